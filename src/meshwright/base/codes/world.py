"""Codes about the world that a run finds at start-up, and about ranks that are lost (E5xx)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E501",
        title="The number of ranks is not the plan's",
        kind="world",
        needs="world size = tp x cp x dp x pp of the plan",
        why="each rank of the mesh is one process; a mesh with a hole or a spare rank has no meaning",
        do="start as many ranks as the plan needs, or plan again for the ranks there are",
        page="""A plan is made for a fixed number of ranks: the product of its degrees.
The world that was found has another number. Nothing has been computed yet.
Under torchrun the number is nnodes x nproc-per-node; locally it is --nproc.
To run the same model on another number of ranks, make a new plan; a checkpoint of the old plan can be
continued under the new one.""",
    ),
    CodeInfo(
        code="E502",
        title="Fewer devices than processes",
        kind="world",
        needs="one device for each process of a node",
        why="two ranks on one device share its memory and wait for each other in collectives",
        do="start fewer processes on this node, or make more devices visible",
        page="""Each process of a node takes one visible device: local rank 0 the first, local rank 1 the second.
With CUDA_VISIBLE_DEVICES=2,3 two processes run on devices 2 and 3, and a third has none.
Check the list of visible devices, the number of processes per node, and whether the scheduler gave the job
the devices it asked for.""",
    ),
    CodeInfo(
        code="E503",
        title="A device is listed more than once",
        kind="world",
        needs="each device at most once in CUDA_VISIBLE_DEVICES",
        why="two ranks would be put on the same device",
        do="list each device once",
        page="""CUDA_VISIBLE_DEVICES names the devices that processes may use, in the order of local ranks.
A device that is listed twice would be given to two ranks; communication libraries refuse that, late and unclearly.""",
    ),
    CodeInfo(
        code="E504",
        title="The port is in use",
        kind="world",
        needs="a port that no other process listens on",
        why="ranks meet at one address; another program (often another run on this machine) holds it",
        do="choose another MASTER_PORT, or leave it out of a local run: a free port is taken by itself",
        page="""A local run asks the system for a free port, so two local runs at once do not meet.
Under torchrun the port is chosen by the launcher; give --rdzv-endpoint another port, or stop the other program.""",
    ),
    CodeInfo(
        code="E505",
        title="A backend for communication is missing",
        kind="world",
        needs="a torch build with the backend (gloo on CPUs, nccl on GPUs)",
        why="this torch was built without it, so ranks cannot talk",
        do="install a torch build that has it, or run on the other kind of device",
        page="""Ranks on CPUs talk through gloo and ranks on GPUs through nccl.
The installed torch says that the backend it would need is not compiled in.""",
    ),
    CodeInfo(
        code="E506",
        title="This torch lacks a name that Meshwright uses",
        kind="world",
        needs="torch 2.13, or a version that has every name of the list",
        why="some parts of torch are used that its authors do not promise to keep; another version has moved them",
        do="install torch 2.13",
        page="""A few parts of torch that the runtime needs are not public: the interpreter of pipeline schedules and
the inside of fully_shard. Each is listed by name with where it is used.
Before anything starts, the installed torch is asked for all of them; what is missing is named, so that a new
torch fails at once and not in the middle of a step.""",
    ),
    CodeInfo(
        code="E507",
        title="The launcher's variables are incomplete or contradict each other",
        kind="world",
        needs="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, set together by torchrun",
        why="a rank that does not know its place cannot join",
        do="start with torchrun, or unset RANK and LOCAL_RANK for a local run",
        page="""When RANK or LOCAL_RANK is set, the process takes itself for a rank that torchrun started.
Then the other variables must be there as well, and RANK must lie below WORLD_SIZE.
A shell that still holds RANK from an earlier experiment is the usual reason.""",
    ),
    CodeInfo(
        code="E508",
        title="The ranks could not meet",
        kind="world",
        needs="all ranks reach the address of rank 0 within the time-out",
        why="a rank did not start, or a firewall or a wrong address keeps it away",
        do="check that every node started its ranks and reaches MASTER_ADDR:MASTER_PORT",
        page="""Before the first collective all ranks meet at the address of rank 0.
One of them did not come within the time-out. Nothing has been computed yet.
Look at the log file of the rank that is missing.""",
    ),
    CodeInfo(
        code="E509",
        title="More ranks than this machine can carry",
        kind="world",
        needs="a number of local ranks that the cores and the memory of the machine can hold",
        why="each rank is a process with its own torch: thousands of them exhaust the memory before the first step",
        do="use fewer ranks here, or start the job with torchrun over more machines",
        page="Ranks on CPUs may share cores, which is slow and right for tests and proofs. The limit is 64 ranks, or\n"
        "16 for each core where that is more.",
    ),
    CodeInfo(
        code="E510",
        title="A rank raised an error",
        kind="fault",
        needs="",
        why="the first error that was a rank's own ends the job; the other ranks only lost their connection",
        do="read the traceback in the rank's log file",
        page="""The report names the rank whose error came first, its place in the mesh, the step and the action.
Errors of other ranks that only say that a connection was closed are consequences and are left out.
The whole traceback is in the log file of the rank.
If the error comes from Meshwright and not from your own code, it is our fault: please report it with that file.""",
    ),
    CodeInfo(
        code="E511",
        title="A rank was killed",
        kind="world",
        needs="",
        why="the operating system, a scheduler or a person ended one process of the job",
        do="look for memory pressure and scheduler messages on that node, then start again from the last checkpoint",
        page="""The process of a rank ended by a signal, without a Python error.
SIGKILL is often the system's answer to exhausted memory (see its kernel log); SIGTERM comes from a scheduler;
SIGABRT and SIGSEGV come from inside a library, and the rank's log file has the last lines it wrote.""",
    ),
    CodeInfo(
        code="E512",
        title="A rank ran out of memory",
        kind="world",
        needs="",
        why="parameters, optimizer state and activations did not fit at this place of the step",
        do="lower the micro-batch, recompute, shard more (zero, tp, pp), or use meshwright plan to see what fits",
        page="""The allocator of the device (or of the machine, on CPUs) could not give a rank what it asked for.
`meshwright plan` predicts the peak of every rank and says which category is largest.
Where the allocator's message has its figures, the report says which of three it was: fragmentation (as much as was
asked for is unused, but in pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True), other processes that hold what
is missing (end them), or a true shortage (the cures above).""",
    ),
    CodeInfo(
        code="E513",
        title="Ranks wait for one that does not come",
        kind="world",
        needs="",
        why="a collective ends only when every rank of its group has called it",
        do="look at what the missing rank does at the place that is named; raise the limit if it is only slow",
        page="""The report says which ranks wait, in which collective and with which shapes, and which rank has not
reached it, with the last step and action that rank said it began.
If every rank waits, their collectives differ: compare the shapes and the order.
If the missing rank is only slow (reading data, writing a checkpoint), a longer limit helps.""",
    ),
    CodeInfo(
        code="E514",
        title="A rank left without a result",
        kind="world",
        needs="",
        why="the process ended by itself (exit) before its work was done",
        do="read the rank's log file: something called exit, or a library ended the process",
        page="""The process of a rank ended with an exit status, not with an error and not by a signal.
Some library, or a worker function, called exit. The rank's log file has what it wrote before.""",
    ),
    CodeInfo(
        code="E515",
        title="The job was told to stop",
        kind="world",
        needs="",
        why="the launching process received SIGTERM; its ranks were ended with it",
        do="start again; a run continues from its last checkpoint",
        page="""SIGTERM usually comes from a scheduler that needs the machine, or from a person.
All ranks of the job were ended, none is left behind.""",
    ),
    CodeInfo(
        code="E520",
        title="The probe cannot measure this world",
        kind="input",
        needs="a number of ranks from 1 up",
        why="each rank is one process that computes and communicates",
        do="give --nproc a whole number from 1 up",
        page="""The probe starts --nproc ranks on this machine, or joins the ranks that torchrun started.
Under torchrun --nproc must be left out or equal the world size.""",
    ),
    CodeInfo(
        code="E521",
        title="The ranks of a probe run on different devices",
        kind="world",
        needs="the same kind of device on every rank",
        why="one set of figures cannot stand for two kinds of device",
        do="probe each kind by itself, and give each its own cluster file",
        page="""A probe's figures are means over its ranks, and a plan takes every rank for alike.
The ranks that were found have devices of different names. A mesh over both runs at the pace of the slower one,
and its memory is that of the smaller one: plan with the probe of that one.""",
    ),
)
