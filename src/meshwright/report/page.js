"use strict";
(function () {
  var data = JSON.parse(document.getElementById("report-data").textContent);
  var pick = document.getElementById("rank-pick");
  var text = document.getElementById("rank-text");
  function showRank(rank) {
    var rows = data.rank_texts[String(rank)];
    if (rows) text.textContent = rows.map(function (i) { return data.lines[i]; }).join("\n");
  }
  if (pick && text) {
    pick.closest(".pick").hidden = false;
    pick.addEventListener("change", function () { showRank(pick.value); });
  }
  document.querySelectorAll(".cell").forEach(function (cell) {
    cell.addEventListener("click", function () {
      if (!pick || !data.rank_texts[cell.dataset.rank]) return;
      pick.value = cell.dataset.rank;
      showRank(pick.value);
      var fold = pick.closest("details");
      if (fold) fold.open = true;
      fold.scrollIntoView({ behavior: "smooth" });
    });
  });
  document.querySelectorAll(".axes").forEach(function (row) {
    var svg = row.parentElement.querySelector("svg[data-axis]");
    var buttons = row.querySelectorAll("button");
    function choose(axis) {
      svg.setAttribute("data-axis", axis);
      buttons.forEach(function (b) { b.setAttribute("aria-pressed", String(b.dataset.axis === axis)); });
    }
    row.hidden = false;
    buttons.forEach(function (b) { b.addEventListener("click", function () { choose(b.dataset.axis); }); });
    choose(svg.getAttribute("data-axis"));
  });
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (d) { d.open = true; });
  });
})();
