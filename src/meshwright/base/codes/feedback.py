"""Codes about running plans, and about measurements that are fed back into predictions (E473-E479)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E473",
        title="The figures are not those of this machine",
        kind="input",
        why="a measurement says something about the machine that it was taken on, and about no other",
        needs="a probe of this machine with these libraries, or a run that was made on it",
        do="write one with `meshwright probe --nproc N --out probe.json`, and plan with --cluster probe.json",
        page="""A probe carries a fingerprint of its machine: device, cores, node, torch and communication library.
`plan --try` runs plans here and compares them with predictions, so the cluster must be a probe of here: a name of the
catalogue, a file by hand, or a probe of another machine (or of this one before an upgrade) is refused. `probe --from-run`
compares the fingerprint in the run folder's probe.json in the same way.""",
    ),
    CodeInfo(
        code="E474",
        title="The plan needs more ranks than can run here",
        kind="world",
        why="a plan is tried with all of its ranks; fewer would be another plan",
        needs="as many devices as ranks, or on CPUs no more ranks than the machine can carry",
        do="probe and plan with fewer ranks, or start it under torchrun on enough machines with meshwright train",
        page="""On GPUs each rank needs a device of its own. On CPUs ranks share cores, up to 16 for each core and 64 on
any machine.""",
    ),
    CodeInfo(
        code="E475",
        title="The run has nothing to feed back",
        kind="input",
        why="feeding back compares a measured step with a prediction on the figures of the same machine",
        needs="a run folder with run.json, a measurement in it, and probe.json of the machine that it ran on",
        do="train for at least 4 steps without `cluster:` in the run file, so that the machine is probed first",
        page="""The folder is not a run's, the run did not end or timed no step (the first step warms up and the third
is traced), or it was planned for a cluster of the catalogue and no probe lies beside it.""",
    ),
    CodeInfo(
        code="E476",
        title="The run was disturbed",
        kind="input",
        why="a fit on steps that something else made long would make every later prediction wrong",
        needs="a middle 80 % of step times narrower than half of their median",
        do="run it again on a quiet machine, for more steps",
        page="""The message prints the spread. Other programs on the cores, a disk that filled up, thermal limits or a
slow neighbour stretch some steps and not others. What was measured stays in the run folder; it is only not believed.""",
    ),
    CodeInfo(
        code="E477",
        title="The ledger of this machine cannot be read",
        kind="input",
        why="predictions fitted on half of what was measured would be called fitted on all of it",
        needs="one JSON object a line, as `plan --try` and `probe --from-run` write them",
        do="remove the damaged line, or move the file away to start again from the probe alone",
        page="""Measured plans of a machine are kept in machines/FINGERPRINT/ledger.jsonl below the cache folder
(MESHWRIGHT_CACHE). The file is replaced whole under a lock, so a damaged line was not written by Meshwright.""",
    ),
    CodeInfo(
        code="E478",
        title="No plan could be tried",
        kind="world",
        why="every one of them failed when it ran",
        needs="at least one plan that runs",
        do="see each plan's error above; `meshwright train --plan plan.json` shows the ranks' logs",
        page="""A plan that fails is a row with its error, and the others go on. When all fail nothing was measured, and
nothing is ranked anew.""",
    ),
    CodeInfo(
        code="E479",
        title="Options of feeding back do not go together",
        kind="input",
        why="one of the options says to measure the machine, the other to read what was measured",
        needs="--from-run with --json only, and --try without --unbuilt",
        do="run the two commands one after the other",
        page="""`probe --from-run RUN` reads a finished run and measures nothing, so --nproc, --quick and --out have
nothing to say there. `plan --try` runs plans, so it cannot take plans that are not built (--unbuilt).""",
    ),
)
