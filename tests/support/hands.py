"""Hands for the agent's core: a test ends its actions one by one, in the order that it likes."""

from pathlib import Path

from ecckpt.agent.core import actions as act
from ecckpt.agent.core.core import Core
from ecckpt.agent.storage.region import Region
from ecckpt.format.fragment_file import pack_table
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.save import Commit, Held, Hold, Protect, Reserve, Stage, Target
from tests.support.builders import generation, header, table_of, writer_of

BUDGET = 1 << 30
OLD, NEW = generation(1, 9), generation(1, 10)


class Hands:
    """Keeps what is to be done: a test ends large actions, one by one, as it likes.

    Notes are written at once, unless ``writes`` is off.
    """

    def __init__(self, **options):
        self.core = Core(node="n1", address="n1:1", budget_bytes=BUDGET, **options)
        self.now_s = 100.0
        self.regions = 0
        self.todo = []
        self.settled = []
        self.answers = []
        self.writes = True
        self.spares = 0  # regions that a fragment can be pulled into before it is asked for

    def tell(self, event):
        for action in self.core.handle(event, self.now_s):
            if isinstance(action, act.Reply | act.Refuse):
                self.answers.append(action)
            elif isinstance(action, act.Remember) and self.writes:
                self.tell(act.Finished(action, self.core.records.get_or_create(action.run).notes))
            elif isinstance(action, act.Large):
                self.todo.append(action)
            elif isinstance(action, act.Borrow) and self.spares:
                self.spares -= 1
                action.taking.region = self.region(action.taking.message.header.file_bytes)
            else:
                self.settled.append(action)

    def ask(self, request):
        """The answer to a request whose actions all succeed."""
        self.tell(request)
        while not self.answers:
            self.end()
        answer = self.answers.pop()
        return answer.message if isinstance(answer, act.Reply) else answer.error

    def next(self, kind):
        found = next((each for each in self.todo if isinstance(each, kind)), None)
        assert found is not None, f"no {kind.__name__} in {self.todo}"
        self.todo.remove(found)
        return found

    def end(self, kind=object, result=None, *, error=None):
        """One large action ends; allocating yields a region, remembering what was written.

        The result of a pull is how many blocks are not what the table says.
        """
        action = self.next(kind)
        if error is not None:
            self.tell(act.Failed(action, error))
            return action
        if isinstance(action, act.Allocate):
            result = self.region(action.size_bytes)
        if isinstance(action, act.Pull):
            result = self.sums(action.taking, result)
        if isinstance(action, act.Remember):
            result = self.core.records.get_or_create(action.run).notes
        self.tell(act.Finished(action, result))
        return action

    def sums(self, taking, bad_blocks):
        sums = table_of(taking.message.header)[taking.message.header.index].copy()
        sums[:bad_blocks] += 1
        return sums

    def region(self, size_bytes):
        self.regions += 1
        return Region(path=Path(f"{self.regions}"), size_bytes=size_bytes, view=memoryview(b""))

    def took(self, kind):
        found = [each for each in self.settled if isinstance(each, kind)]
        self.settled = [each for each in self.settled if not isinstance(each, kind)]
        return found

    def held(self, run="test"):
        headers = self.core.records.get(run).inventory("n1").headers
        return sorted((each.shard.generation, each.shard.rank, each.index) for each in headers)


def reserve(gen=NEW, **fields):
    return Reserve(
        header=header(gen=gen, **fields), memory_bytes=BUDGET, local_ranks=1, holders=5, discard=()
    )


def stage(hands, gen=NEW, **fields):
    """A shard in its slot."""
    slot = hands.ask(reserve(gen, **fields))
    assert hands.ask(Stage(slot.header, slot.region)) == Done()
    return slot


def protect(gen=NEW, *, writer=1, targets=range(5), least=3, every_living=False, timeout_s=60.0):
    where = tuple(Target(index, f"h{index}", f"h{index}:1") for index in targets)
    return Protect(
        shard=header(gen=gen).shard,
        writer=writer_of(writer),
        targets=where,
        min_fragments=least,
        every_living=every_living,
        memory_bytes=BUDGET,
        timeout_s=timeout_s,
        discard=(),
    )


def hold(index=2, *, writer=1, discard=(), repair=False, **fields):
    shard = header(index, **{"gen": NEW} | fields)
    table = pack_table(table_of(shard))
    return Hold(
        header=shard,
        writer=writer_of(writer),
        table=table,
        source="n0:1",
        memory_bytes=BUDGET,
        timeout_s=60.0,
        discard=discard,
        repair=repair,
    )


def held(index, problem="", gen=NEW):
    return Held(header(gen=gen).shard, index, f"h{index}", problem)


def commit(gen):
    return Commit("test", gen)


def scattering(hands, **fields):
    """A shard of which peers are being asked to hold fragments."""
    stage(hands)
    hands.ask(protect(**fields))
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    return header(gen=NEW).shard


def take(hands, message):
    """Hold a fragment; what the home is told."""
    hands.ask(message)
    hands.end(act.Allocate)
    hands.end(act.Pull, 0)
    return hands.end(act.Post).message.problem


def state(hands, gen=NEW):
    return hands.core.progress(header(gen=gen).shard)
