"""Measures what Sentinel costs a loop, with the real daemon on the same cores.

    python -m bench.overhead [--rounds 20] [--loop small gpt wide] [--short] [--write]
    python -m bench.overhead --nodes [--short]         # each loop alone, and then as one of the two nodes of a job

Loops: a small one, the same fed by a DataLoader, a transformer and an MLP, each in a process of its own. Each is
attached with default settings, and again with overhead=1.0: every statistic at every step. Measured for each:

    accounted   CPU of the hooks, of the sender's thread and of the daemon, over CPU of the loop itself, while it runs
                watched for half a minute without a break. The governor limits the same sum. Bars: 2 % on gpt and
                wide, 5 % on small and fed
    wall, cpu   watched over bare, in one process: blocks of steps in random order, a third of them watched and two
                thirds bare. For a bare block every hook and every patch is removed, and put back after it; the
                sender and the daemon stay, idle. Mean of the paired ratios with the 95 % interval of 2,000
                bootstrap samples. `cpu` is of the training process alone. Both include what the accounts cannot: the
                effect of the daemon's work on the loop's caches, and on a core that shares its hardware with another
    control     the same ratio for the two bare blocks of each round: how much one loop differs from itself on this
                machine. The ratios show no cost that is within that interval
    floor       one read of all gradients (torch._foreach_norm) over a bare step: at every step, and at the spacing of
                the layer statistics

The hooks are timed as a whole, from PyTorch's call of each until it returns. From the patches of
torch.autograd.backward and of the loader's __next__ the time of the patched function is subtracted, and the cost of the
inner clock, as measured in the same loop before anything is attached. The clock is the wall clock: reading the CPU
clock is a system call, and would cost more than some of the hooks. A call that took over four times as long as nearly
all of its kind counts as four times: another program ran during it. PyTorch's own cost of calling the hooks is left
out; the ratios include it. Results are kept in build/overhead.json as they come, and a loop that is there is not
measured again (except with --fresh). --write puts the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.pages import BUILD, DOCS, make_table, write_section
from bench.places import make_places

RESULTS = BUILD / "overhead.json"
MARKS = "<!-- bench/overhead.py writes this -->", "<!-- to here -->"

LOOPS = {
    "small": "100 layers 32 x 32, 200 tensors, SGD",
    "fed": "the same, fed by a DataLoader",
    "gpt": "10.6 M-parameter transformer, AdamW",
    "wide": "44 M-parameter MLP, AdamW",
}
Block = TypeVar("Block")
"""What the measurement of a block of steps returns."""
MODELS = "small", "gpt", "wide"
"""The loops that differ in more than where their batches come from."""
STEPS = {"small": 512, "fed": 512, "gpt": 16, "wide": 16}
"""Steps of a block: two to five seconds, and a multiple of the usual spacings so that all blocks hold equal samples."""
BARS = {"small": 0.05, "fed": 0.05, "gpt": 0.02, "wide": 0.02}
OUTLIER, NEARLY_ALL = 4.0, 0.995
"""A call counts as at most `OUTLIER` times the duration that the share `NEARLY_ALL` of the calls stays within."""
EPOCH = 4096
"""Batches in an epoch of the loader."""
DEFAULT = 0.0
"""Stands for: no `overhead` is given to `attach`."""
EVERYTHING = 1.0
"""The `overhead` at which everything is sampled at every step."""
SETTLE_SECONDS = 0.3
"""Pause after a block, in which the sender sends it and the daemon judges it."""


def model_and_batch(name: str) -> tuple[Any, Any]:
    """Return the model and a batch of one of the loops."""
    import torch
    from torch import nn

    if name in ("small", "fed"):  # the worst case for a hook
        layers = [nn.Linear(32, 32) for _ in range(100)]
        for layer in layers:  # otherwise activations shrink to subnormal numbers, which are ten times as slow
            nn.init.orthogonal_(layer.weight)
        return nn.Sequential(*layers), torch.randn(16, 32)
    if name == "wide":
        widths = [1024, *[3520] * 4, 1024]
        return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]), torch.randn(16, 1024)
    block = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, norm_first=True, dropout=0.0)
    return nn.TransformerEncoder(block, 6, enable_nested_tensor=False), torch.randn(4, 64, 384)


class Loop:
    """One of `LOOPS`, watched or bare."""

    def __init__(self, name: str) -> None:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        self.name = name
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model, self._batch = model_and_batch(name)
        kind = torch.optim.SGD if name in ("small", "fed") else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-4)
        self._shape = self.model(self._batch).shape
        rows, *shape = self._batch.shape
        self._loader = DataLoader(TensorDataset(torch.randn(EPOCH * rows if name == "fed" else 1, *shape)), rows)
        self._batches: Iterator[Any] = iter(())

    def _fetch(self) -> None:
        """Take the next batch of the loader, starting its next epoch when needed."""
        fetched = next(self._batches, None)
        if fetched is None:
            self._batches = iter(self._loader)
            fetched = next(self._batches)
        (self._batch,) = fetched

    def step(self) -> None:
        import torch

        if self.name == "fed":
            self._fetch()
        # New targets at each step: a loss memorised to the last bit is taken for a loss outlier, and sampled in full.
        (self.model(self._batch) - torch.randn(self._shape)).square().mean().backward()
        self.optimizer.step()

    def block(self, steps: int) -> tuple[float, float]:
        """Make `steps` steps; return the seconds they took, (wall, CPU of this process)."""
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - begin, time.process_time() - used

    def floor(self) -> float:
        """Return the CPU seconds of one read of all gradients."""
        import torch

        self.step()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return least_of(20, time.thread_time, lambda: torch._foreach_norm(gradients))


class Timed:
    """A function, and the seconds of each call made by `call`, a closure that adds little to what it measures."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, array("d")
        clock, took = time.perf_counter, self.calls.append

        def call(*arguments: Any, **named: Any) -> Any:
            begin = clock()
            try:
                return function(*arguments, **named)
            finally:
                took(clock() - begin)

        self.call = call


class Around:
    """Times Sentinel's patch around a function of torch: the seconds of each call, without the function itself."""

    def __init__(self, owner: Any, name: str) -> None:
        """Put the inner clock around the function. Must run before anything is attached."""
        self._owner, self._name = owner, name
        self._bare = Timed(getattr(owner, name))
        setattr(owner, name, self._bare.call)
        self._clock = 0.0
        self.begin()

    def calibrate(self) -> None:
        """Measure the inner clock's own cost. Nothing may have been attached since `begin`."""
        self._clock = statistics.median(calls) if (calls := self.end()) else 0.0

    def begin(self) -> None:
        """Measure from now on."""
        self._begun = len(self._bare.calls)
        self._whole = Timed(getattr(self._owner, self._name))
        setattr(self._owner, self._name, self._whole.call)

    def end(self) -> list[float]:
        """Stop measuring; return the seconds of each call."""
        setattr(self._owner, self._name, self._whole.function)
        pairs = zip(self._whole.calls, self._bare.calls[self._begun :], strict=True)
        return [whole - bare - self._clock for whole, bare in pairs]


class Hooks:
    """Sentinel's hooks and patches that PyTorch calls on the training thread, timed inside the `with` block."""

    def __init__(self, loop: Loop, patches: Sequence[Around]) -> None:
        optimizer, model = loop.optimizer, loop.model
        steps = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        self._places: list[Any] = [model._forward_pre_hooks, model._forward_hooks, *steps]
        self._patches = patches
        self._calls: list[Sequence[float]] = []

    def __enter__(self) -> Hooks:
        self._hooks: list[Timed] = []
        for place in self._places:
            for key, hook in place.items():
                self._hooks.append(timed := Timed(hook))
                place[key] = timed.call
        for patch in self._patches:
            patch.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls = [
            *(hook.calls for hook in self._hooks),
            *(calls for patch in self._patches if (calls := patch.end())),
        ]
        hooks = iter(self._hooks)
        for place in self._places:
            for key in place:
                place[key] = next(hooks).function

    @property
    def steps(self) -> int:
        """Number of steps that were timed."""
        return len(self._calls[-1])

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of the hooks in all steps together, and in a typical step."""
        return sum(map(sum_calls, self._calls)), sum(map(statistics.median, self._calls))


def sum_calls(calls: Sequence[float]) -> float:
    """Return the seconds of all calls, cut off where other programs ran in between (`OUTLIER`)."""
    usual = sorted(calls)
    most = OUTLIER * usual[int(NEARLY_ALL * len(usual))] if usual else 0.0
    return math.fsum(min(call, most) for call in usual)


class Switch:
    """Takes all of Sentinel out of the training thread, and puts it back."""

    def __init__(self, loop: Loop, monitor: Any) -> None:
        from sentinel.hooks.session import registry

        self._loop = loop
        self._pause = lambda: monitor.phase("bare")  # so that an unseen loop is not taken for a hang
        self._paused = contextlib.ExitStack()
        self.session: Any = registry.find_session([loop.optimizer])
        (self._monitor,) = self.session.monitors  # otherwise only its hooks hold it, and they are removed

    def off(self) -> None:
        from sentinel.hooks.loop import patches

        self._paused.enter_context(self._pause())
        self.session.unhook()
        patches.unlisten(self.session._listening)

    def on(self) -> None:
        from sentinel.hooks.loop import forward_passes, patches

        self._monitor._end_stretch()
        self._monitor._previous_exit = None  # so that the break does not count as a step
        slot = self.session.collector._slots[0]
        self._monitor.hook(self.session.handles)
        forward_passes.watch(self._loop.model, self.session.accumulator, slot, self.session.handles)
        patches.listen(self.session._listening)
        self._paused.close()


def trainee(name: str, overhead: float, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure one loop in this process, at an `overhead` or at `DEFAULT`; return what `table` reads."""
    import torch
    from torch.utils.data import dataloader

    import sentinel
    from sentinel.cli.client import ask_daemons

    loop, steps = Loop(name), STEPS[name]
    patches = [Around(torch.autograd, "backward"), Around(dataloader._BaseDataLoaderIter, "__next__")]
    loop.block(steps)
    for patch in patches:
        patch.calibrate()
    monitor = sentinel.attach(loop.model, loop.optimizer, run=f"bench-{name}", overhead=overhead or None)
    switch = Switch(loop, monitor)
    governor = switch.session.governor
    until = time.monotonic() + 8  # the daemon starts; the first second of its accounts is dropped; 50 steps
    while time.monotonic() < until or governor._counted < 150:
        loop.block(steps // 4)
    daemon = ask_daemons("status")[0]["pid"]
    hooks = Hooks(loop, patches)
    answer: dict[str, Any] = account_parts(loop, switch, hooks, daemon, seconds)
    answer |= {"spacing": {str(tier): every for tier, every in governor.spacing.items()}, "costs": governor.costs}
    pairs = [run_round(lambda: loop.block(steps), switch) for _ in range(rounds)]
    switch.off()
    answer["step"] = statistics.median(bare[1] for _, bare, _ in pairs) / steps
    answer["floor"] = loop.floor() / answer["step"]
    for number, clock in enumerate(("wall", "cpu")):
        answer[clock] = interval([watched[number] / bare[number] for watched, bare, _ in pairs])
        answer[f"control_{clock}"] = interval([other[number] / bare[number] for _, bare, other in pairs])
    runs = ask_daemons("status")[0]["runs"]
    answer["view"] = job["view"] if (job := runs[0]["job"]) else "one node"
    answer |= {"dropped": switch.session.sender.queue.dropped, "load": os.getloadavg()[0], "rounds": rounds}
    monitor.detach()
    return answer


def account_parts(loop: Loop, switch: Switch, hooks: Hooks, daemon: int, seconds: float) -> dict[str, Any]:
    """Return the CPU of each part over that of the loop itself, while it runs without a break.

    `microseconds` are those of the hooks: per step on average, and in a typical step.
    """

    def used() -> list[float]:
        sender = switch.session.sender.native_id
        return [thread_seconds(os.getpid(), sender), process_seconds(daemon), time.process_time()]

    with hooks:
        before, until = used(), time.monotonic() + seconds
        while time.monotonic() < until:
            loop.block(STEPS[loop.name] // 4)
        sender, served, process = (now - then for now, then in zip(used(), before, strict=True))
    own, typical = hooks.seconds()
    itself = process - own - sender
    shares = {"hooks": own / itself, "sender": sender / itself, "daemon": served / itself}
    return {"accounted": shares, "microseconds": [own / hooks.steps * 1e6, typical * 1e6]}


def run_round(block: Callable[[], Block], switch: Switch) -> tuple[Block, Block, Block]:
    """Run a watched block, a bare one, and another bare one in random order; return what each took, in this order."""
    found: dict[str, Block] = {}
    for kind in random.sample(["watched", "bare", "other"], 3):
        if kind == "watched":
            found[kind] = block()
            time.sleep(SETTLE_SECONDS)
            continue
        switch.off()
        found[kind] = block()
        switch.on()
    return found["watched"], found["bare"], found["other"]


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean, and the 95 % interval of its bootstrap distribution."""
    means = sorted(statistics.fmean(random.choices(values, k=len(values))) for _ in range(2000))
    return [statistics.fmean(values), means[50], means[-51]]


def least_of(times: int, clock: Callable[[], float], function: Callable[[], object]) -> float:
    """Return the median duration of a call, in the clock's seconds."""
    seconds = []
    for _ in range(times):
        begin = clock()
        function()
        seconds.append(clock() - begin)
    return statistics.median(seconds)


def thread_seconds(pid: int, thread: int) -> float:
    """Return the CPU seconds of a thread, by the scheduler's nanoseconds: /proc/<pid>/stat has only hundredths."""
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) * 1e-9


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process that are alive."""
    return sum(thread_seconds(pid, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir())


def measure_loop(name: str, overhead: float, rounds: int, seconds: float, *, in_job: bool = False) -> dict[str, Any]:
    """Run `trainee` in a process and places of its own. `in_job`: as node 1 of a job, with its coordinator."""
    with contextlib.ExitStack() as stack:
        places = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {**os.environ, **make_places(places)}
        if in_job:
            environment |= stack.enter_context(open_job(places / "coordinator"))
        command = [sys.executable, "-m", "bench.overhead", "--trainee", name, str(overhead), str(rounds), str(seconds)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


@contextlib.contextmanager
def open_job(folder: Path) -> Iterator[dict[str, str]]:
    """Run the coordinator of a job over two nodes, with a rank that makes one step a second.

    Yields the environment of a rank of the other node.
    """
    # Imported here: it needs zenoh, which the machine with a GPU that measures the rest may lack.
    from bench.cluster import RUN_ID, SECRET, LocalRanks, await_daemon, find_free_address

    job = {"SENTINEL_CLUSTER": find_free_address(), "SENTINEL_CLUSTER_SECRET": SECRET}
    folder.mkdir()
    directory = folder / "run" / RUN_ID
    daemon = [sys.executable, "-m", "sentinel", "daemon", "--directory", str(directory)]
    stop = threading.Event()
    with subprocess.Popen(daemon, env={**os.environ, **make_places(folder), **job}) as process:
        await_daemon(directory / "sentinel.sock")
        ranks = LocalRanks(directory / "sentinel.sock", 1, nodes=2)
        stepping = threading.Thread(target=ranks.step_until, args=(stop.is_set,))
        stepping.start()
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
        try:
            yield job | place | {"SENTINEL_RUN_ID": RUN_ID}
        finally:
            stop.set()
            stepping.join()
            process.kill()


COLUMNS = (
    "loop", "step", "hooks: mean, most steps", "hooks + sender + daemon = accounted", "bar", "wall [95 %]", "control",
    "cpu [95 %]", "control", "norms / layers", "floor",
)  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table, with the rounds and the load averages below."""
    rows: list[list[str]] = []
    for key in sorted(results, key=_place):
        (name, overhead), result = key.split("@"), results[key]
        parts = result["accounted"]
        split = " + ".join(f"{parts[part]:.2%}" for part in ("hooks", "sender", "daemon"))
        bar = f"{BARS[name]:.0%}" if float(overhead) < EVERYTHING else "none"
        every = result["spacing"]["2"]
        sampled = "every step" if every == 1 else f"every {result['spacing']['1']} / {every} steps"
        floor = f"{result['floor']:.2%}" + (f", {result['floor'] / every:.2%}" if every > 1 else "")
        each, most = result["microseconds"]
        cells = [
            name,
            f"{result['step'] * 1000:.1f} ms",
            f"{each:.0f} us, {most:.0f} us",
            f"{split} = **{sum(parts.values()):.2%}**",
            bar,
        ]
        cells += [_ratio(result[what]) for what in ("wall", "control_wall", "cpu", "control_cpu")]
        rows.append([*cells, sampled, floor])
    loads = [result["load"] for result in results.values()]
    rounds = min(result["rounds"] for result in results.values())
    said = f"{rounds} rounds at least; the machine's load average after each: {min(loads):.1f} to {max(loads):.1f}."
    return f"{make_table(COLUMNS, rows)}\n\n{said}"


def compare_nodes(loops: Iterable[str], rounds: int, seconds: float) -> None:
    """Print each loop at default settings, on one node and as a node of a job."""
    for name, in_job in itertools.product(loops, (False, True)):
        result = measure_loop(name, DEFAULT, rounds, seconds, in_job=in_job)
        print(f"{name}, {result['view']}", table({f"{name}@{DEFAULT}": result}).splitlines()[2], flush=True)


def _place(key: str) -> tuple[str, int]:
    name, overhead = key.split("@")
    return overhead, list(LOOPS).index(name)


def _ratio(mean_low_high: Sequence[float]) -> str:
    mean, low, high = mean_low_high
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the stretch whose CPU is accounted")
    parser.add_argument("--loop", nargs="*", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--short", action="store_true", help="3 rounds, 10 seconds: to see that it runs")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--nodes", action="store_true", help="measure what a job over two nodes adds; nothing is kept")
    parser.add_argument("--trainee", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainee:
        name, overhead, rounds, seconds = options.trainee
        print(json.dumps(trainee(name, float(overhead), int(rounds), float(seconds))))
        return
    rounds, seconds = (3, 10.0) if options.short else (options.rounds, options.seconds)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.fresh else {}
    if options.nodes:
        compare_nodes(options.loop, rounds, seconds)
        return
    for overhead, name in itertools.product((DEFAULT, EVERYTHING), options.loop):
        key = f"{name}@{overhead}"
        if key not in results:
            results[key] = measure_loop(name, overhead, rounds, seconds)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))
        print(table({key: results[key]}).splitlines()[2], flush=True)
    print(table(results))
    if options.write:
        write_section(DOCS / "performance.md", MARKS, table(results))


if __name__ == "__main__":
    main()
