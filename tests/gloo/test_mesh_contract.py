"""The private names of torch are all there, and one that is not is named."""

from __future__ import annotations

from meshwright.mesh.contract import EXACT_NAMES, NAMES, POOL_NAMES, PrivateName, missing


def test_every_name_resolves_in_this_torch() -> None:
    assert missing() == missing(EXACT_NAMES) == missing(POOL_NAMES) == []
    assert len(NAMES) == len(set(NAMES)) > 0


def test_e506_names_what_is_missing() -> None:
    gone = (
        PrivateName("torch.distributed.pipelining.schedules", "_Action.no_such_method", "parallel.pipeline"),
        PrivateName("torch.no_such_module", "name", "parallel.zero"),
        NAMES[0],
    )
    problems = missing(gone)
    assert [p.code for p in problems] == ["E506", "E506"]
    assert "_Action.no_such_method" in problems[0].found
    assert "meshwright.parallel.zero" in problems[1].found
    assert "2.13" in problems[0].do


def test_arguments_instances_and_choices_are_looked_at() -> None:
    """A name may be there and take other arguments, or live on instances only."""
    stage = "torch.distributed.pipelining"
    names = (
        PrivateName(stage, "PipelineStage.__init__(no_such_argument)", "parallel.pipeline"),
        PrivateName(stage, "PipelineStage.__init__(input_grads)", "parallel.pipeline"),
        PrivateName("collections", "Counter().total|no_such_name", "parallel.zero"),
        PrivateName("collections", "Counter().no_such_name", "parallel.zero"),
    )
    found = [p.found for p in missing(names)]
    assert len(found) == 2
    assert "no PipelineStage.__init__(no_such_argument)" in found[0]
    assert "no Counter().no_such_name" in found[1]
    assert len(missing(names, pipeline=False)) == 1  # a layout without stages needs none of theirs
    kept = (PrivateName("collections", "no_such_name", "checkpoint.metadata"),)
    assert len(missing(kept)) == 1
    assert missing(kept, saving=False) == []  # a user's own loop saves nothing with us


def test_every_private_import_of_the_torch_half_is_listed() -> None:
    """A private torch name that is imported in src must stand in the list."""
    import ast
    from pathlib import Path

    import meshwright

    listed = {(n.module, n.name.split(".")[0]) for n in (*NAMES, *EXACT_NAMES, *POOL_NAMES)}
    unlisted = []
    for path in Path(meshwright.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                module = node.module or ""
                private_module = any(part.startswith("_") for part in module.split("."))
                unlisted += [
                    f"{path.name}: {module}.{alias.name}"
                    for alias in node.names
                    if (private_module or alias.name.startswith("_")) and (module, alias.name) not in listed
                ]
    assert unlisted == []
