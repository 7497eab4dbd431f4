"""The command line as a contract: exit codes, Problems for every kind of wrong input, nothing written, no traceback."""

from __future__ import annotations

import errno
import importlib.machinery
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.codes import CODES
from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.cli.main import app, run

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "recipes" / "models" / "tiny-llama")
PLAN = ["plan", "llama-2-7b", "--cluster", "a100-40gb-x8", "--seq-len", "2048", "--global-batch", "64"]
COMMANDS = (
    *("inspect", "models", "clusters", "plan", "estimate", "backtest", "probe", "train", "prove", "explain"),
    *("simulate", "checkpoint", "convert", "report", "doctor", "init", "config"),
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, so that what a command writes is seen."""
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(args)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def answer_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    code, out, _ = answer(capsys, *args, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize(
    "command", [[], *([c] for c in COMMANDS), ["checkpoint", "export"], ["config", "show"]]
)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, _ = answer(capsys, *command, "--help")
    assert code == 0
    assert out.startswith("Usage: meshwright")


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys)
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_every_command_speaks_json() -> None:
    missing = [
        command.callback.__name__
        for group in (app, *(sub.typer_instance for sub in app.registered_groups))
        for command in group.registered_commands
        if command.callback is not None
        and "as_json" not in command.callback.__annotations__
        and not (command.context_settings or {}).get("allow_extra_args")
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["pln"], "E860", "plan"),
        (["checkpoint", "merg"], "E860", "merge"),
        ([*PLAN, "--seq-length", "3"], "E861", "--seq-len"),
        (["plan", "--cluster"], "E862", ""),
        (["inspect"], "E862", ""),
        (["explain"], "E862", ""),
        (["explain", LLAMA, "--layout", "dp=2"], "E862", "0 to 1"),
        ([*PLAN, "--top", "0"], "E863", ""),
        ([*PLAN, "--top", "many"], "E863", ""),
        ([*PLAN, "--objective", "speed"], "E863", ""),
        (["inspect", LLAMA, "more"], "E863", ""),
        (["explain", LLAMA, "--rank", "0"], "E864", "--layout"),
        (["explain", "plan.json", "--seq-len", "3", "--rank", "0"], "E864", ""),
        (["train", "x.yaml", "--layout", "dp=2", "--plan", "p.json"], "E864", ""),
        (["prove", "x.yaml", "--model", LLAMA, "--layout", "dp=2"], "E864", ""),
        (["prove", "--model", LLAMA, "--layout", "dp=2", "--set", "run.seed=1"], "E864", ""),
        (["prove", "--model", LLAMA, "--layout", "dp=2", "--packed", "--resume"], "E864", "one after"),
        (["prove", "--model", "opt-6.7b", "--layout", "dp=2", "--packed"], "E654", "qwen3_moe"),
        (["prove", "--layout", "dp=2"], "E862", ""),
        (["prove", "--model", LLAMA], "E862", ""),
        (["prove", str(ROOT / "recipes" / "demo.yaml")], "E862", "--layout"),
        (["backtest", "runs.csv", "--folds", "3"], "E864", "--calibrate"),
        (["backtest", "no-such.csv"], "E460", "exists"),
        (["convert", "x", "--to", "deepspeed"], "E900", "init"),
        (["doctor"], "E900", "probe"),
        (["checkpoint", "merge", "nowhere", "--out", "e"], "E701", "step-N"),
        (["checkpoint", "reshard", "nowhere", "--layout", "dp=2", "--out", "e"], "E701", "step-N"),
        ([*PLAN, "--try", "2", "--unbuilt"], "E479", "without --unbuilt"),
        ([*PLAN, "--adapter", "qlora"], "E274", ""),
        ([*PLAN, "--adapter", "lora"], "E274", ""),
        (["train", "nowhere.yaml"], "E100", ""),
        (["inspect", "nowhere"], "E120", ""),
        (["explain", "E988"], "E455", ""),
        (["explain", "e21"], "E455", "E210"),
        (["explain", "E21333"], "E455", "E213"),
        (["train", "x.yaml", "--layout", "dp=2", "--set", "layout=dp=3"], "E864", "one of the two"),
        (["prove", "x.yaml", "--layout", "dp=2", "--set", "layout=dp=3"], "E864", "one of the two"),
        (["init", LLAMA, "--out", "no/such/folder/run.yaml"], "E867", "another path"),
        ([*PLAN, "--out", "no/such/folder/plan.json"], "E867", "another path"),
    ],
)
def test_wrong_input_is_a_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], code: str, said: str
) -> None:
    exit_code, found = answer_json(capsys, *args)
    assert exit_code == ExitCode.BAD_INPUT
    first = found["problems"][0]
    assert first["code"] == code
    assert {"code", "where", "found", "needs", "why", "do"} <= first.keys()
    assert said in first["do"] + first["needs"]
    exit_code, out, err = answer(capsys, *args)
    assert (exit_code, out) == (ExitCode.BAD_INPUT, "")
    assert err.startswith(f"{code}  ")
    assert list(tmp_path.iterdir()) == []


def test_a_group_without_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(capsys, "checkpoint")
    assert code == ExitCode.BAD_INPUT
    assert err.startswith("E862  meshwright checkpoint: the command is missing")


def test_every_missing_option_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = answer_json(capsys, "plan", "llama-2-7b", "--seq-len=8")
    assert [p["found"] for p in found["problems"]] == ["--cluster is missing", "--global-batch is missing"]


def test_our_fault_is_named_and_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(target: str) -> None:
        raise ZeroDivisionError("seven\nlines")

    monkeypatch.setattr("meshwright.model.read_hf.read_model", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = answer(capsys, "inspect", LLAMA)
    assert (code, out) == (ExitCode.FAULT, "")
    assert err.startswith("E999  meshwright: an unexpected ZeroDivisionError: seven; the details are in ")
    (file,) = tmp_path.glob("meshwright-fault-*.txt")
    assert str(file) in err
    kept = file.read_text()
    assert "Traceback" in kept
    assert f"meshwright inspect {LLAMA}" in kept


def test_interruption_and_full_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.model.read_hf.read_model", interrupted)
    assert answer(capsys, "inspect", LLAMA) == (130, "", "meshwright: interrupted\n")

    def full(target: str) -> None:
        raise OSError(28, "No space left on device", "plan.json")

    monkeypatch.setattr("meshwright.model.read_hf.read_model", full)
    code, found = answer_json(capsys, "inspect", LLAMA)
    assert code == ExitCode.ENVIRONMENT
    assert found["problems"][0]["code"] == "E867"


def test_an_environment_error_keeps_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(target: str) -> None:
        raise MeshwrightError(problem("E511", found="killed"), ExitCode.ENVIRONMENT)

    monkeypatch.setattr("meshwright.model.read_hf.read_model", killed)
    assert answer(capsys, "inspect", LLAMA)[0] == ExitCode.ENVIRONMENT


def test_without_a_network_the_hub_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_network(endpoint: str) -> None:
        raise OSError("Name or service not known")

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("meshwright.cli.init._reach", no_network)
    code, found = answer_json(capsys, "init", "owner/name")
    assert code == ExitCode.ENVIRONMENT
    assert found["problems"][0]["code"] == "E868"
    assert list(tmp_path.iterdir()) == []


def test_a_hub_model_is_kept_beside_the_run_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = Path(LLAMA, "config.json").read_text()
    monkeypatch.setattr("meshwright.cli.init.fetch_config", lambda hub_id: config)
    code, found = answer_json(capsys, "init", "owner/name")
    assert code == 0
    assert found["model"] == "name"
    assert (tmp_path / "name" / "config.json").read_text() == config
    assert answer(capsys, "config", "show", "run.yaml")[0] == 0
    # A run file that exists is never replaced.
    assert answer_json(capsys, "init", LLAMA)[1]["problems"][0]["code"] == "E867"


class Calls:
    """A stand-in for a module of the torch half: remembers what the command passed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, function: str, result: dict[str, Any]
    ) -> None:
        self.args: tuple[Any, ...] = ()
        self.given: dict[str, Any] = {}
        self.error: Exception | None = None
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)

        def call(*args: Any, **given: Any) -> dict[str, Any]:
            self.args, self.given = args, given
            if self.error is not None:
                raise self.error
            return result

        setattr(module, function, call)
        monkeypatch.setitem(sys.modules, name, module)


def test_train_passes_the_resolved_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls(
        monkeypatch, "meshwright.orchestrate.training", "train_command", {"final_loss": float("nan")}
    )
    demo = str(ROOT / "recipes" / "demo.yaml")
    args = ["train", demo, "--layout", "dp=2", "--nproc", "2", "--steps", "5", "--set", "optimizer.name=sgd"]
    code, out, err = answer(capsys, *args, "--resume", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == {"final_loss": None}
    assert "W101" in err  # betas do nothing with sgd
    (resolved,) = calls.args
    assert (resolved.layout_text, resolved.optimizer.name) == ("dp=2", "sgd")
    assert (calls.given["nproc"], calls.given["stop_at_step"], calls.given["resume"]) == (2, 5, True)
    # The details of a fault go into the run folder when there is one.
    calls.error = RuntimeError("boom")
    folder = tmp_path / "run"
    folder.mkdir()
    code, _, err = answer(capsys, "train", demo, "--set", f"run.dir={folder}")
    assert code == ExitCode.FAULT
    assert str(folder) in err
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("passed", [True, False])
def test_prove_answers_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    result = {
        "passed": passed,
        "world_size": 2,
        "steps": 3,
        "loss": {"max_abs_diff": 0.0},
        "gradients": {"max_rel_diff": 0.5, "worst": {"tensor": "head", "step": 2}, "missing": ["bias"]},
        "grad_norm": {"max_rel_diff": 0.0},
        "weights": {"max_rel_diff": 0.0, "worst": "head"},
        "tolerance": {"gradients": 1e-10},
        "sentinel": {"factor": 2.0, "cause": "twice"},
        "ledger": {"matches": True},
        "placement": {"complete": True},
        "ladder": [
            {
                "adds": "dp=2",
                "layout": "dp=2,precision=fp64",
                "passed": passed,
                "max_rel_diff": 0.5,
                "worst": None,
            }
        ],
    }
    calls = Calls(monkeypatch, "meshwright.orchestrate.proving", "prove_command", result)
    args = ["prove", "--model", LLAMA, "--layout", "dp=2", "--freeze", "a", "--freeze", "b", "--tie"]
    code, found = answer_json(capsys, *args)
    assert code == (0 if passed else ExitCode.NO)
    assert found == result
    assert calls.given["freeze"] == ("a", "b")
    assert (calls.given["precision"], calls.given["valid"], calls.given["tie"]) == (None, "unequal", True)
    _, out, _ = answer(capsys, *args)
    assert ("PASSED" if passed else "FAILED") in out
    assert "bias" in out
    assert "twice" in out
    assert "head (step 2)" in out
    assert "dp=2,precision=fp64" in out
    # The run file's batch is not the proof's: dp = 3 does not divide it, and the proof has its own.
    demo = str(ROOT / "recipes" / "demo.yaml")
    assert answer(capsys, "prove", demo, "--layout", "dp=3")[0] == code


def test_checkpoint_verify_answers_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = [{"file": "a.distcp", "why": "hash", "tensors": ["head"]}]
    result = {"path": "d", "ok": False, "incomplete": "", "files": 1, "damaged": damaged}
    Calls(monkeypatch, "meshwright.checkpoint.inspect", "verify_command", result)
    code, out, _ = answer(capsys, "checkpoint", "verify", "d")
    assert code == ExitCode.NO
    assert "head" in out


def test_help_is_light_and_plan_needs_no_torch() -> None:
    script = """
import sys
import time
import tomllib
from meshwright.cli.main import run
run(["--help"])
heavy = {"torch", "transformers", "pydantic", "numpy", "scipy", "rich", "yaml"} & set(sys.modules)
assert not heavy, heavy
assert run(%r) == 0
heavy = {"torch", "transformers", "tokenizers", "safetensors", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script % PLAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_same_program() -> None:
    command = [sys.executable, "-m", "meshwright", "pln", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BAD_INPUT
    assert json.loads(done.stdout)["problems"][0]["code"] == "E860"


def test_every_code_has_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "explain", "--all-markdown")
    assert re.findall(r"^## ([EW]\d{3}): ", out, re.M) == sorted(CODES)
    assert all(CODES[code].title in out for code in CODES)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--seq-len", "nan"], "'nan': "),
        (["--seq-len=0"], "'0': "),
        (["--seq-len", "1", "--seq-len", "x"], ""),
    ],
)
def test_a_value_of_the_wrong_kind_is_shown(
    capsys: pytest.CaptureFixture[str], given: list[str], shown: str
) -> None:
    _, found = answer_json(capsys, "inspect", LLAMA, *given)
    first = found["problems"][0]
    assert (first["code"], first["where"]) == ("E863", "meshwright inspect --seq-len")
    assert first["found"].startswith(f"{shown}Input should be")


class Full:
    """A stream on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_problems_that_cannot_be_written_keep_their_exit_code(
    monkeypatch: pytest.MonkeyPatch, stream: str, as_json: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, stream, Full())
    assert run(["inspect", "nowhere", *as_json]) == ExitCode.BAD_INPUT


def test_a_result_that_cannot_be_written_is_no_good_end(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a device that is always full is Linux's")
    command = [sys.executable, "-m", "meshwright", "models"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == ExitCode.ENVIRONMENT
    assert done.stderr.startswith("E867  ")
    assert "Traceback" not in done.stderr


def test_ctrl_c_that_a_library_makes_another_error_of_is_still_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(_: str) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from None

    monkeypatch.setattr("meshwright.model.read_hf.read_model", read)
    at_first = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert run(["inspect", LLAMA]) == 130
        assert "interrupted" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, at_first)


def test_progress_that_nobody_reads_is_no_error() -> None:
    """The first line fails, later ones and the end of the program do not."""
    code = (
        "import os; from meshwright.cli.train import print_now; from meshwright.cli.main import main\n"
        "[print_now(str(n)) for n in range(3)]; os.write(2, b'went on'); main(['--version'])"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"went on")


def test_ctrl_c_while_the_program_is_loaded_is_one_line() -> None:
    """The console script's target loads nothing before it can answer Ctrl-C."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["meshwright"]
    module, function = target.split(":")
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        f"from {module} import {function} as main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "meshwright: interrupted\n")
