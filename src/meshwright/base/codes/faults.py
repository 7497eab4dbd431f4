"""Codes about lost ranks, nodes and links, and about going on without them (E574-E579, W574-W579)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E574",
        title="The connection to another rank, or to torchrun's agent, was lost",
        kind="world",
        why="a rank ended, or the link to it broke, while this rank waited for it",
        needs="every rank of the job, and the links between them",
        do="look at the rank that ended first; torchrun --max-restarts N goes on from the last checkpoint by itself",
        page="""Under torchrun each rank ends by itself and tells what it saw. A rank that only lost its connection is not
the culprit: the first error in time is, which torchrun prints as the root cause, on whichever node it was.
Nothing after the last checkpoint was kept; nothing before it was lost.""",
    ),
    CodeInfo(
        code="E575",
        title="Ranks give no sign of life",
        kind="world",
        why="a link that is cut without a word, or a node that vanishes, closes no connection: collectives would "
        "wait for half an hour",
        needs="a sign from the named ranks within guards.silence_s seconds",
        do="look at the named node and at the network between the addresses; --resume goes on from the last checkpoint",
        page="""Our own launcher calls the roll of its ranks; a process that is stopped, or stuck where it cannot answer,
is lost after guards.silence_s seconds.
Ranks that torchrun started send each other a small datagram twice a second. A rank that heard its neighbours and then
hears nothing for guards.silence_s seconds names them, with their address and what they did last, and ends:
then torchrun ends or restarts the job, in place of a hang.
When all silent ranks are on one other node, that node or the link to it is at fault; when one of several ranks of a
node is silent, that process is. guards.silence_s: 0 switches this off.""",
    ),
    CodeInfo(
        code="E576",
        title="No layout for the ranks that are left",
        kind="input",
        why="an elastic run goes on in a layout that the planner finds legal on the ranks that there are",
        needs="a legal layout with this number of ranks for the run's model, batch and data",
        do="start as many ranks as the text names, or as many as before",
        page="""Under torchrun every process is a rank, so the layout must use all of them. Without torchrun the planner
may leave ranks unused. The batch is part of the run: it does not change when ranks are lost, so dp must still
divide it.""",
    ),
    CodeInfo(
        code="E577",
        title="The restarts are used up",
        kind="world",
        why="run.max_restarts bounds how often an elastic run begins again by itself; a fault that comes each time is "
        "not cured by another restart",
        needs="at most run.max_restarts lost ranks in one start of the command",
        do="look at the rank's log; then --resume goes on from the last checkpoint",
    ),
    CodeInfo(
        code="E578",
        title="The ranks do not begin at the same place",
        kind="world",
        why="each rank that torchrun starts reads the run folder by itself, and all must find the same checkpoint, plan "
        "and data there",
        needs="one run folder and the same data on all nodes",
        do="put run.dir (and the data) on storage that all nodes share, or copy them",
    ),
    CodeInfo(
        code="E579",
        title="Ranks on other nodes cannot reach this address",
        kind="world",
        why="gloo and torchrun tell other nodes the address of the host's name; here it leads back to this machine",
        needs="an address that every node can reach",
        do="torchrun --local-addr ADDRESS on the first node, and GLOO_SOCKET_IFNAME=INTERFACE where the text names one",
        page="""Many systems map the host's own name to 127.0.0.1. On one machine nobody notices; over several nodes each
rank would call itself. Meshwright takes the interface through which MASTER_ADDR is reached and says so (W575); it
refuses when there is none, or when MASTER_ADDR itself leads to this machine on a node that is not the first.""",
    ),
    CodeInfo(
        code="W574",
        title="A restart would lose more than it must",
        kind="input",
        why="a run that restarts goes on from its newest checkpoint; steps since then are computed again",
        do="set run.checkpoint_every to what may be lost",
    ),
    CodeInfo(
        code="W575",
        title="gloo was told which interface to use",
        kind="world",
        why="the host's name leads to this machine itself, which ranks on other nodes cannot reach",
        do="set GLOO_SOCKET_IFNAME to use another one",
    ),
    CodeInfo(
        code="W576",
        title="A link is slow",
        kind="world",
        why="a message between the two ranks takes guards.slow_link times as long as the best of its kind in this run",
        do="meshwright probe under torchrun measures all links; look at the network between the two addresses",
    ),
    CodeInfo(
        code="W577",
        title="The plan changed",
        kind="world",
        why="ranks were lost, and the layout of the run needs more than there are",
        do="resume with the full number of ranks to have the first layout again",
    ),
    CodeInfo(
        code="W578",
        title="The run began again from its last checkpoint",
        kind="world",
        why="a rank was lost, and run.elastic (or torchrun --max-restarts) lets the run go on by itself",
    ),
    CodeInfo(
        code="W579",
        title="torchrun gives less time to save than run.grace_s",
        kind="world",
        why="after SIGTERM torchrun's agent kills its workers when its own time is over",
        do="set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to at least run.grace_s seconds where torchrun is started",
    ),
)
