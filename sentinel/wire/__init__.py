"""Messages between a rank, the daemon and the command line, and their framing.

A frame is a 4-byte big-endian length and one msgpack map whose `type` names the message. msgpack and not JSON,
because JSON has no NaN. Maps and not arrays, because a daemon must be able to read the `protocol` of a hello
from another version, and unknown fields are ignored, so that fields can be added. Numbers in bulk travel as
packed little-endian arrays inside `bytes`: 0.3 us a batch instead of 17.

A rank is keyed (attempt, rank), a sample (attempt, seq, rank):

    run      name + unique id; the ranks of one job share it
    attempt  restart count of the scheduler or torchrun; a script started by hand again is a new run
    seq      ordinal, from 0, of the attempted optimizer steps of the first optimizer. Never rewinds; a step that
             the loss scaler skips counts. People are shown `seq + Hello.step_offset`
    stream   0 for the first optimizer; others have series, and a seq, of their own

The modules: `rank`, `daemon` and `command` have the messages by sender; `parts` has the types that several of them
share; `framing` converts messages to bytes.
"""

from __future__ import annotations

from sentinel.wire.command import Answer, JobFault, JobReport, Order, Query, Standing, Supervise
from sentinel.wire.daemon import (
    Abort,
    Ask,
    Attend,
    CancelPublish,
    Closing,
    Commit,
    DaemonCost,
    FindMeeting,
    Held,
    Kept,
    Notice,
    Prepare,
    Publish,
    Refused,
    Spacing,
    Stop,
    Welcome,
    Withhold,
)
from sentinel.wire.framing import (
    FRAME_LIMIT,
    OPENING_LIMIT,
    Frames,
    FromRank,
    ToRank,
    frame,
    from_rank,
    is_known,
    opening_protocol,
    to_rank,
    unpack_column,
)
from sentinel.wire.parts import PROTOCOL, Identity, Layer, Members, Message, RollbackTerms, RuleText, RunSummary
from sentinel.wire.rank import (
    Batch,
    Collected,
    Column,
    Goodbye,
    Hello,
    LayerBlock,
    LayerTable,
    MeetingFound,
    Pace,
    PhaseChanged,
    Prepared,
    Published,
    Reply,
    RolledBack,
    SnapshotTaken,
    StageBegan,
)

__all__ = [
    "FRAME_LIMIT",
    "OPENING_LIMIT",
    "PROTOCOL",
    "Abort",
    "Answer",
    "Ask",
    "Attend",
    "Batch",
    "CancelPublish",
    "Closing",
    "Collected",
    "Column",
    "Commit",
    "DaemonCost",
    "FindMeeting",
    "Frames",
    "FromRank",
    "Goodbye",
    "Held",
    "Hello",
    "Identity",
    "JobFault",
    "JobReport",
    "Kept",
    "Layer",
    "LayerBlock",
    "LayerTable",
    "MeetingFound",
    "Members",
    "Message",
    "Notice",
    "Order",
    "Pace",
    "PhaseChanged",
    "Prepare",
    "Prepared",
    "Publish",
    "Published",
    "Query",
    "Refused",
    "Reply",
    "RollbackTerms",
    "RolledBack",
    "RuleText",
    "RunSummary",
    "SnapshotTaken",
    "Spacing",
    "StageBegan",
    "Standing",
    "Stop",
    "Supervise",
    "ToRank",
    "Welcome",
    "Withhold",
    "frame",
    "from_rank",
    "is_known",
    "opening_protocol",
    "to_rank",
    "unpack_column",
]  # fmt: skip
