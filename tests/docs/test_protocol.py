"""docs/PROTOCOL.md and docs/openapi.yaml against the code: nothing is left out, nothing made up.

Verbs, messages, refusals, placement, status, spans and limits. The part between the ranks is tried
by a rank that was written from the document alone: test_foreign_rank.py.
"""

import io
import json
import re
import socket
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
import torch

import ecckpt
from ecckpt import errors
from ecckpt.agent import deadlines
from ecckpt.agent.core import fetch, health, hold, prefetch, repair
from ecckpt.agent.runtime import daemon, metrics, service
from ecckpt.agent.runtime import http_app as app
from ecckpt.agent.storage.region import Region
from ecckpt.client.config import ClusterConfig
from ecckpt.client.read import open as opening
from ecckpt.format.fragment_file import Header, pack_table
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.policy.placement import Node, parse_code, plan_placement, plan_repair
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.encoding import (
    MESSAGE_LIMIT_BYTES,
    PROTOCOL_VERSION,
    REQUEST_LIMIT_BYTES,
    pack_message,
    run_of,
)
from ecckpt.protocol.messages.disk import Retain, Store, Verify
from ecckpt.protocol.messages.repair import Guard, Member, Repair
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Forget
from ecckpt.protocol.messages.save import (
    Commit,
    Hold,
    Prefetch,
    Protect,
    Reserve,
    Revoke,
    Stage,
    Watch,
)
from ecckpt.protocol.verbs import VERBS
from ecckpt.state.snapshot.replicas import form_of
from tests.support.builders import SESSION, generation, header, message_classes, table_of, writer_of

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "PROTOCOL.md").read_text()
YAML = (DOCS / "openapi.yaml").read_text()
SHARD = "/v1/runs/{run}/shards/{generation}/{rank}"


def messages():
    """Return the fields of everything that travels, by class name."""
    found = {
        kind.__name__: [field.name for field in fields(kind)]
        for kind in (*message_classes(), ShardId, RollBack, Headers, Inventory)
        if isinstance(kind, type) and is_dataclass(kind) and kind not in (Header, Generation)
    }
    # A header travels flat.
    own = [field.name for field in fields(Header)]
    found["Header"] = ["run", "generation", "rank", *own[1:]]
    return found


def verbs():
    """Return the verbs of POST requests: verb -> (class of the body, of the answer, local)."""
    return {
        name: (verb.request.__name__, verb.answer.__name__, verb.local)
        for name, verb in VERBS.items()
        if not verb.is_read
    }


def test_the_agent_answers_every_verb_as_the_table_says():
    for name, verb in VERBS.items():
        hints = typing.get_type_hints(getattr(app.AgentService, name))
        assert hints.pop("return") is verb.answer, name
        (hint,) = hints.values()
        assert verb.request in (typing.get_args(hint) or (hint,)), name


def literals():
    """Return the paths and last parts that app.py compares with."""
    code = Path(app.__file__).read_text()
    whole = re.findall(r'"(/v1/\w+|/metrics)"', code)
    return set(whole), set(re.findall(r'\] [!=]= "(\w+)"', code))


def section(document, start, end):
    """Return what stands between two patterns, both at the start of a line."""
    parts = re.split(start, document, maxsplit=1, flags=re.M)
    assert len(parts) == 2, start
    return re.split(end, parts[1], maxsplit=1, flags=re.M)[0]


def columns(document, first):
    """Return the rows of the table whose header begins with these cells, as lists of cells."""
    head = r" \| ".join(map(re.escape, first))
    (rows,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", document, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


def quoted(text):
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


# -- paths ----------------------------------------------------------------------------------------


def test_the_table_of_verbs_is_that_of_the_code():
    listed = columns(TEXT, ["verb", "request", "answer", "where", "errors"])
    expected = [
        [
            f"`{name}`",
            "-" if verb.is_read else verb.request.__name__,
            verb.answer.__name__,
            "socket" if verb.local else "TCP",
            ", ".join(each.__name__ for each in verb.errors),
        ]
        for name, verb in VERBS.items()
    ]
    assert sorted(row[:5] for row in listed) == sorted(expected)


def test_every_verb_is_in_the_yaml():
    for name, verb in VERBS.items():
        operation = section(YAML, rf"^  /v1/runs/{{run}}/{name}:$", r"^  \S|^\S")
        assert f"    {'get' if verb.is_read else 'post'}:" in operation
        tag = "look" if verb.is_read else "socket" if verb.local else "peer"
        assert f"tags: [{tag}]" in operation
        bodies = [] if verb.is_read else [verb.request.__name__]
        assert re.findall(r"schemas/(\w+)", operation) == [*bodies, verb.answer.__name__]
        named = ", ".join(each.__name__ for each in verb.errors)
        assert f"      x-errors: [{named}]\n" in operation


def test_every_other_path_is_in_both():
    whole, parts = literals()
    assert whole == {"/v1/node", "/v1/status", "/v1/shutdown", "/metrics"}
    reads = {name for name, verb in VERBS.items() if verb.is_read}
    looks = {f"/v1/runs/{{run}}/{look}" for look in reads}
    assert all(f"\n  {path}:\n" in YAML for path in looks)
    assert {"table", "shard"} <= parts
    for path in whole | {f"{SHARD}/table", f"{SHARD}/shard", f"{SHARD}/fragments/{{index}}"}:
        assert f"\n  {path}:\n" in YAML
        assert re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), path) in TEXT


def test_no_path_is_made_up():
    listed = set(re.findall(r"^  (/\S+):$", YAML, re.M))
    known = {f"/v1/runs/{{run}}/{verb}" for verb in verbs()} | literals()[0]
    assert listed - known == {
        "/v1/runs/{run}/inventory",
        "/v1/runs/{run}/identities",
        "/v1/runs/{run}/trace",
        f"{SHARD}/table",
        f"{SHARD}/shard",
        f"{SHARD}/fragments/{{index}}",
    }


def test_every_metric_is_in_the_document():
    for name, *_ in metrics._METRICS:
        assert f"`{name}`" in TEXT


def test_every_status_is_in_both():
    for status in app._REASONS:
        assert re.search(rf"^\| [\d, ]*\b{status}\b[\d, ]* \|", TEXT, re.M), status
        assert f"{status}" in YAML


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", messages())
def test_every_field_is_in_both(name):
    expected = messages()[name]
    table = section(TEXT, rf"^### {name}$", r"^#")
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == expected
    schema = section(YAML, rf"^    {name}:$", r"^    \S")
    assert re.findall(r"^        (\w+):", schema, re.M) == expected
    required = re.findall(r"required: \[(.*)\]", schema)
    assert required == ([", ".join(expected)] if expected else [])


def test_no_message_is_made_up():
    listed = re.findall(r"^    (\w+):$", section(YAML, r"^  schemas:$", r"^\S"), re.M)
    assert sorted(listed) == sorted(messages())
    assert re.findall(r"^### (\w+)$", section(TEXT, r"^## 14\.", r"^## "), re.M) == listed


def test_header_travels_as_listed():
    generation = Generation(1, 2, "0" * 16)
    header = Header(
        shard=ShardId("r", generation, 0),
        world_size=1,
        index=0,
        k=1,
        m=0,
        shard_bytes=0,
        fragment_bytes=832,
        block_bytes=4096,
        home="n",
        parent=None,
        created_unix_s=0,
    )
    assert list(header.to_wire()) == messages()["Header"]


# -- refusals -------------------------------------------------------------------------------------

EXAMPLES = [
    errors.Fenced(timeline=1, current=2),
    errors.OlderStart(timeline=1, current=2),
    errors.AgentMismatch("this is another node"),
    errors.TwoHistories("test", {"test~a": "n1", "test~b": "n2"}),
    errors.NotHeld("n1 has no such thing"),
    errors.InvalidMessage("no such message"),
    errors.InvalidConfig("no name"),
    errors.MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="a slot"),
    errors.TmpfsFull("/dev/shm", need_bytes=2, free_bytes=1),
    errors.NotMapped("a file", need_bytes=2, limit_bytes=-1),
    errors.RequestRefused("n1", 503, "busy"),
    errors.TooFewFragments("a shard", rank=0, have=1, need=2),
    errors.CorruptFragment("a table"),
]


def refusals():
    """Return the rows of the table of refusals by error."""
    rows = columns(TEXT, ["error", "status", "facts", "verbs"])
    return {quoted(row[0])[0]: row for row in rows}


def test_the_table_of_refusals_is_that_of_the_code():
    rows = refusals()
    assert rows.keys() - {"Refused"} == {type(each).__name__ for each in EXAMPLES}
    for error in EXAMPLES:
        name = type(error).__name__
        status, kind, body = app._refusal(error)
        said = msgpack.unpackb(body)
        assert (said["error"], kind) == (name, "application/msgpack")
        assert rows[name][1] == str(status)
        assert quoted(rows[name][2]) == list(said["facts"])
        answering = {verb for verb, each in VERBS.items() if type(error) in each.errors}
        assert set(quoted(rows[name][3])) == answering
        # What a caller in another process makes of it.
        again = errors.revive(said["error"], said["message"], said["facts"])
        assert type(again) is type(error)
        assert errors.facts(again) == said["facts"]


def test_every_status_that_the_code_gives_an_error_is_in_the_table():
    rows = refusals()
    assert {kind.__name__ for kind, _ in app._STATUSES} <= rows.keys()
    http_only = {int(status) for status in rows["Refused"][1].split(", ")}
    assert http_only | {int(row[1]) for name, row in rows.items() if name != "Refused"} == (
        app._REASONS.keys() - {200, 206}
    )
    assert errors.revive("Refused", "", {}) is None


MEMORY = 64 << 20
OLD, NOW = generation(1, 10), generation(2, 20)


def _contents(file, size):
    with file:
        return [file.read(size)]


class Http:
    """An agent in this process, asked as the server asks it; fenced at timeline 2."""

    def __init__(self, folder, *, token=""):
        self.agent = service.AgentService(
            folder / "memory", node="n1", domain="n1", address="127.0.0.1:1", token=""
        )
        self._application = app.Application(self.agent, token=token, stop=lambda: None)
        self.agent.begin(Begin("test", RunWriter(2, SESSION), 0.0))

    def ask(self, method, path, body=b"", *, local=True, **extra):
        """Return the status and the body of an answer."""
        seen = []
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            "wsgi.file_wrapper": _contents,
            "gunicorn.socket": SimpleNamespace(family=socket.AF_UNIX if local else socket.AF_INET),
        }
        answer = self._application(environ | extra, lambda status, head: seen.append(status))
        return int(seen[0].split()[0]), b"".join(answer)

    def call(self, verb, message):
        """Return the status and the decoded answer to a verb."""
        if VERBS[verb].is_read:
            status, body = self.ask("GET", f"/v1/runs/{message}/{verb}")
            return status, msgpack.unpackb(body)
        path = f"/v1/runs/{run_of(message)}/{verb}"
        status, body = self.ask("POST", path, pack_message(message))
        return status, msgpack.unpackb(body)

    def reserve(self, shard, memory_bytes=MEMORY):
        return self.call(
            "reserve",
            Reserve(header=shard, memory_bytes=memory_bytes, local_ranks=1, holders=0, discard=()),
        )

    def stage(self, shard):
        """Put a shard of zeros into a slot; its home copy is staged then."""
        status, slot = self.reserve(shard)
        assert status == 200
        assert self.call("stage", Stage(shard, slot["region"])) == (200, {})

    def seal(self, shard):
        """Have it coded as well, for no holders."""
        self.stage(shard)
        assert self.call("protect", protect_of(shard)) == (200, {})
        for _ in range(10):
            watch = Watch(shard.shard, "encoding", 5.0)
            if self.call("watch", watch)[1]["state"] == "protected":
                return
        raise AssertionError("not protected")


def own(gen=NOW, **fields):
    """Return a home copy's header of node n1."""
    return header(gen=gen, home="n1", k=2, m=1, **fields)


def protect_of(shard, writer=None):
    writer = shard.shard.generation.timeline if writer is None else writer
    return Protect(
        shard=shard.shard,
        writer=writer_of(writer),
        targets=(),
        min_fragments=0,
        every_living=False,
        memory_bytes=MEMORY,
        timeout_s=5.0,
        discard=(),
    )


def hold_of(shard, index=0, table=None):
    table = pack_table(table_of(shard)) if table is None else table
    writer = shard.shard.generation.timeline
    return Hold(
        header=shard.at(index),
        writer=writer_of(writer),
        table=table,
        source="127.0.0.1:1",
        memory_bytes=MEMORY,
        timeout_s=5.0,
        discard=(),
        repair=False,
    )


def fetch_of(shard, memory_bytes=MEMORY):
    return Fetch(
        header=shard,
        writer=writer_of(shard.shard.generation.timeline),
        sources=(),
        memory_bytes=memory_bytes,
        timeout_s=5.0,
    )


def repair_of(shard, memory_bytes=MEMORY):
    return Repair(
        header=shard,
        writer=writer_of(shard.shard.generation.timeline),
        sources=(),
        targets=(),
        memory_bytes=memory_bytes,
        timeout_s=5.0,
    )


def guard_of(writer, holders=0, members=0):
    others = tuple(Member(f"n{number}", "d", "127.0.0.1:1") for number in range(members))
    return Guard(
        run="test",
        writer=writer_of(writer),
        members=others,
        holders=holders,
        local_ranks=1,
        memory_bytes=MEMORY,
        timeout_s=5.0,
    )


def prefetch_of(gen, index=0):
    return Prefetch(
        header=own(gen).at(index),
        writer=writer_of(gen.timeline),
        source="127.0.0.1:1",
        timeout_s=5.0,
        discard=(),
    )


def _maps_no_more(http, monkeypatch):
    def refuse(*args, **options):
        raise errors.NotMapped("a region", need_bytes=2, limit_bytes=1)

    monkeypatch.setattr(http.agent.region_store.tier, "allocate", refuse)


def _reserved_for_another_world(http, monkeypatch):
    http.reserve(own(world_size=9))
    monkeypatch.setattr(Region, "name", "0" * 16)


def _has_committed(http, monkeypatch):
    http.call("commit", Commit("test", NOW))


def _fetches_nothing(http, monkeypatch):
    monkeypatch.setattr(fetch, "FETCHES", 0)


def _knows_two_runs(http, monkeypatch):
    for digit in "ab":
        http.agent.commit(Commit(f"twice~{digit * 16}", NOW))


def _reads_its_disk(http, monkeypatch):
    http.agent.core.records.await_disk()


def _verifies_much(http, monkeypatch):
    while http.agent._verifying.acquire(blocking=False):
        pass


def _holds_nothing(http, monkeypatch):
    monkeypatch.setattr(hold, "_QUEUE_LIMIT", 0)


def _has_a_staged_slot(http, monkeypatch):
    http.stage(own())


HUGE = own(shard_bytes=1 << 46, block_bytes=1 << 30)
# For every error of every verb: a request that is refused with it, and what happens before.
PROVOKED = {
    ("reserve", "Fenced"): (
        Reserve(header=own(OLD), memory_bytes=MEMORY, local_ranks=1, holders=0, discard=()),
        None,
    ),
    ("reserve", "InvalidMessage"): (
        Reserve(header=own().at(0), memory_bytes=MEMORY, local_ranks=1, holders=0, discard=()),
        None,
    ),
    ("reserve", "MemoryBudgetTooSmall"): (
        Reserve(header=own(), memory_bytes=1, local_ranks=1, holders=0, discard=()),
        None,
    ),
    ("reserve", "TmpfsFull"): (
        Reserve(header=HUGE, memory_bytes=1 << 60, local_ranks=1, holders=0, discard=()),
        None,
    ),
    ("reserve", "NotMapped"): (
        Reserve(header=own(), memory_bytes=MEMORY, local_ranks=1, holders=0, discard=()),
        _maps_no_more,
    ),
    ("stage", "Fenced"): (Stage(own(OLD), "0" * 16), None),
    ("stage", "NotHeld"): (Stage(own(), "0" * 16), None),
    ("stage", "InvalidMessage"): (Stage(own(), "0" * 16), _reserved_for_another_world),
    ("protect", "Fenced"): (protect_of(own(), writer=1), None),
    ("protect", "NotHeld"): (protect_of(own()), None),
    ("prefetch", "Fenced"): (prefetch_of(OLD), None),
    ("prefetch", "InvalidMessage"): (prefetch_of(NOW, index=2), None),
    ("hold", "Fenced"): (hold_of(own(OLD)), None),
    ("hold", "InvalidMessage"): (hold_of(own(), index=-1), None),
    ("hold", "CorruptFragment"): (hold_of(own(), table=b"none"), None),
    ("hold", "RequestRefused"): (hold_of(own()), _holds_nothing),
    ("commit", "Fenced"): (Commit("test", OLD), None),
    ("revoke", "Fenced"): (Revoke("test", OLD), None),
    ("revoke", "InvalidMessage"): (Revoke("test", NOW), _has_committed),
    ("begin", "Fenced"): (Begin("test", RunWriter(2, "f" * 16), 0.0), None),
    ("begin", "InvalidMessage"): (Begin("test", RunWriter(3, ""), 0.0), None),
    ("begin", "OlderStart"): (Begin("test", RunWriter(3, "f" * 16), 1e6), None),
    ("fence", "Fenced"): (Fence("test", writer_of(1), None, ()), None),
    ("fetch", "Fenced"): (fetch_of(own(OLD)), None),
    ("fetch", "RequestRefused"): (fetch_of(own()), _fetches_nothing),
    ("fetch", "MemoryBudgetTooSmall"): (fetch_of(own(), 1), None),
    ("fetch", "TmpfsFull"): (fetch_of(HUGE, 1 << 60), None),
    ("fetch", "NotMapped"): (fetch_of(own()), _maps_no_more),
    ("fetch", "TooFewFragments"): (fetch_of(own()), None),
    ("slot", "NotHeld"): (own().shard, None),
    ("slot", "InvalidMessage"): (own().shard, _has_a_staged_slot),
    ("assign", "NotHeld"): (Assign(own().shard), None),
    ("assign", "InvalidMessage"): (Assign(own().shard), _has_a_staged_slot),
    ("inventory", "TwoHistories"): ("twice", _knows_two_runs),
    ("trace", "TwoHistories"): ("twice", _knows_two_runs),
    ("forget", "TwoHistories"): (Forget("twice", RunWriter(3, SESSION)), _knows_two_runs),
    ("forget", "Fenced"): (Forget("test", RunWriter(1, SESSION)), None),
    ("forget", "InvalidMessage"): (Forget("test", RunWriter(3, "")), None),
    ("forget", "RequestRefused"): (Forget("test", RunWriter(3, SESSION)), _reads_its_disk),
    ("guard", "Fenced"): (guard_of(writer=1), None),
    ("guard", "InvalidMessage"): (guard_of(writer=2, holders=2, members=1), None),
    ("repair", "Fenced"): (repair_of(own(OLD)), None),
    ("repair", "RequestRefused"): (repair_of(own()), _fetches_nothing),
    ("repair", "MemoryBudgetTooSmall"): (repair_of(own(), 1), None),
    ("repair", "TmpfsFull"): (repair_of(HUGE, 1 << 60), None),
    ("repair", "NotMapped"): (repair_of(own()), _maps_no_more),
    ("repair", "TooFewFragments"): (repair_of(own()), None),
    ("store", "Fenced"): (Store("test", OLD, 0, ()), None),
    ("retain", "Fenced"): (Retain("test", writer_of(1), (NOW,)), None),
    ("retain", "InvalidMessage"): (Retain("test", writer_of(2), ()), None),
    ("verify", "NotHeld"): (Verify(own().shard, 0, disk=False, bytes_per_s=0), None),
    ("verify", "RequestRefused"): (
        Verify(own().shard, 0, disk=False, bytes_per_s=0),
        _verifies_much,
    ),
}


@pytest.mark.parametrize("run", ["-x", ".", "..", "a" * 65, "a~b", "a~" + "0" * 15, "a b", "~"])
def test_a_name_that_is_none_is_refused_in_every_path(run, tmp_path):
    http = Http(tmp_path)
    gen = "1.1.0123456789abcdef"
    looks = [f"{name}" for name, verb in VERBS.items() if verb.is_read]
    shards = [f"shards/{gen}/0/{what}" for what in ("table", "shard", "fragments/0")]
    for path in (*looks, *shards):
        status, body = http.ask("GET", f"/v1/runs/{run}/{path}")
        assert (status, msgpack.unpackb(body)["error"]) == (400, "InvalidConfig"), path


def test_every_error_of_every_verb_is_provoked_below():
    expected = {(verb, each.__name__) for verb in VERBS for each in VERBS[verb].errors}
    assert PROVOKED.keys() == expected


@pytest.mark.parametrize(("verb", "error"), PROVOKED)
def test_an_agent_refuses_as_the_table_says(verb, error, tmp_path, monkeypatch):
    http = Http(tmp_path)
    request, before = PROVOKED[verb, error]
    if before is not None:
        before(http, monkeypatch)
    row = refusals()[error]
    status, said = http.call(verb, request)
    assert (said["error"], str(status)) == (error, row[1]), said
    assert list(said["facts"]) == quoted(row[2])
    if error == "Fenced":
        assert said["facts"]["current"] == 2


HTTP_REFUSALS = [
    (400, "POST", "/v1/runs/test/commit", {"CONTENT_LENGTH": ""}),
    (401, "GET", "/v1/node", {"local": False}),
    (403, "POST", "/v1/runs/test/stage", {"local": False, "HTTP_AUTHORIZATION": "Bearer secret"}),
    (403, "POST", "/v1/shutdown", {"local": False, "HTTP_AUTHORIZATION": "Bearer secret"}),
    (404, "POST", "/v1/runs/test/inventory", {}),
    (404, "GET", "/v1/runs/test/commit", {}),
    (405, "PUT", "/v1/runs/test/commit", {}),
    (413, "POST", "/v1/runs/test/commit", {"CONTENT_LENGTH": str(REQUEST_LIMIT_BYTES + 1)}),
    (416, "GET", f"/v1/runs/test/shards/{NOW}/0/shard", {"HTTP_RANGE": "bytes=5-2"}),
]


@pytest.mark.parametrize(("status", "method", "path", "extra"), HTTP_REFUSALS)
def test_http_refuses_as_the_table_says(tmp_path, status, method, path, extra):
    http = Http(tmp_path, token="secret")
    if status == 416:
        http.seal(own())
        assert http.ask(method, path)[0] == 200
        assert http.ask(method, path, HTTP_RANGE="bytes=0-9")[0] == 206
    seen, body = http.ask(method, path, **extra)
    assert (seen, msgpack.unpackb(body)["error"]) == (status, "Refused")
    assert str(status) in refusals()["Refused"][1].split(", ")


def test_other_refusals_in_the_document(tmp_path):
    http = Http(tmp_path)
    status, body = http.ask("POST", "/v1/runs/test/commit", b"\xc1")
    assert (status, msgpack.unpackb(body)["error"]) == (400, "InvalidMessage")
    status, said = http.call("commit", Commit("no name", NOW))
    assert (status, said["error"]) == (400, "InvalidConfig")
    other = pack_message(Commit("other", NOW))
    assert http.ask("POST", "/v1/runs/test/commit", other)[0] == 400
    for what in ("table", "shard", "fragments/0"):
        status, body = http.ask("GET", f"/v1/runs/test/shards/{NOW}/0/{what}")
        assert (status, msgpack.unpackb(body)["error"]) == (404, "NotHeld")


# -- states, placement, status, spans -------------------------------------------------------------


def test_a_home_copy_goes_through_the_states_of_the_diagram(tmp_path):
    http, shard = Http(tmp_path), own()
    watch = Watch(shard.shard, "", 0.0)
    path = f"/v1/runs/test/shards/{NOW}/0/shard"

    def state():
        return http.call("watch", watch)[1]["state"]

    def files():
        return msgpack.unpackb(http.ask("GET", "/v1/runs/test/inventory")[1])["headers"]["indices"]

    slot = http.reserve(shard)[1]
    region = Path(slot["path"])
    assert (state(), files(), http.ask("GET", path)[0]) == ("unknown", [], 404)
    assert slot["file_bytes"] >= shard.file_bytes  # the whole file, not the payload
    assert http.reserve(shard)[1]["region"] != slot["region"]
    assert not region.exists()  # one for a rank: the older one was discarded
    http.stage(shard)
    assert (state(), files(), http.ask("GET", path)[0]) == ("staging", [], 404)
    http.seal(shard)
    assert (state(), files(), http.ask("GET", path)[0]) == ("protected", [-1], 200)
    http.agent.core.home(shard.shard).pins += 1  # in use
    region = http.agent.core.home(shard.shard).region
    newer = own(generation(2, 21), rank=1)
    http.reserve(newer)
    http.stage(newer)
    http.seal(newer)
    assert http.call("commit", Commit("test", generation(2, 21)))[0] == 200
    assert (files(), http.ask("GET", path)[0]) == ([-1], 404)  # doomed; the newer one is there
    assert bytes(region.view[:8]) != bytes(8)
    states = section(TEXT, r"^stateDiagram-v2$", r"^```$")
    for name in ("reserved", "staged", "encoding", "sealed", "doomed", "recycled", "discarded"):
        assert re.search(rf"^    .* --> {name}", states, re.M), name


def test_states_of_a_shard_in_the_document():
    (line,) = re.findall(r"^\| `state` \| text \| (.*): section 4 \|$", TEXT, re.M)
    (said,) = re.findall(r"^`Progress.state` of a shard: (.*)$", TEXT, re.M)
    assert set(quoted(line)) <= set(quoted(said))


def test_placement_as_in_the_example():
    domains = dict(zip("abcdefghi", ["r1"] * 3 + ["r2"] * 3 + ["r3"] * 3, strict=True))
    placement = plan_placement(
        [Node(*each) for each in domains.items()], parse_code("2+1", len(domains))
    )
    rows = columns(TEXT, ["group", "dealt", "turns", "ring order"])
    assert [row[3].split(", ") for row in rows] == [
        [node.id for node in group] for group in placement.groups
    ]
    for number, row in enumerate(rows):  # by the words of the document
        dealt = [node for at, node in enumerate("abcdefghi") if at % 2 == number]
        turns = [
            sum(domains[before] == domains[node] for before in dealt[:at])
            for at, node in enumerate(dealt)
        ]
        assert row[1].split(", ") == dealt
        assert row[2].split(", ") == list(map(str, turns))
        by_turn = sorted(zip(turns, range(len(dealt)), dealt, strict=True))
        assert row[3].split(", ") == [node for _, _, node in by_turn]
    for home, *holders, spare in columns(TEXT, ["home", "holds fragment 0"]):
        ring = [node.id for node in placement.ring(home)]
        assert tuple(holders) == placement.holders[home]
        assert spare == ", ".join(ring[3:])
    assert (placement.nodes_survived, placement.domains_survived) == (2, 1)
    assert "Any 2 nodes may be lost, or any 1 domain (c = 2)." in TEXT
    plan = plan_repair(
        home="a",
        indices=3,
        present={0: ["e"]},
        holders=placement.holders["a"],
        nodes={node.id: node.domain for node in placement.ring("a") if node.id != "c"},
    )
    assert plan == {1: "g", 2: "i"}
    assert (
        "Fragment 1 goes to its holder `g`; fragment 2, whose holder was `c`, goes to `i`" in TEXT
    )


def test_the_code_that_auto_is():
    for nodes in range(2, 40):
        code = parse_code("auto", nodes)
        m = min(2, (nodes - 1) // 2)
        assert (code.k, code.m, code.holders) == (min(8, nodes - 1 - m), m, code.k + m)
    one = parse_code("auto", 1)
    assert (one.k, one.m, one.holders) == (1, 0, 0)


def test_every_field_of_the_status_is_in_the_document(tmp_path):
    http = Http(tmp_path)
    http.seal(own())
    assert http.call("guard", guard_of(writer=2))[0] == 200
    http.agent.commit(Commit("test", NOW))
    http.agent._driver._handle(alarm_of_the_guard(http.agent))
    status = json.loads(http.ask("GET", "/v1/status")[1])
    run = status["runs"]["test"]

    def listed(first):
        rows = columns(TEXT, [first, "type"])
        return [name for row in rows for name in quoted(row[0])]

    top = section(TEXT, r"^## 12\.", r"^## ")
    (rows,) = re.findall(r"^\| field \| type \| \|\n\|[-|]+\|\n((?:\|.*\n)+)", top, re.M)
    names = [name for row in rows.splitlines() for name in quoted(row.split("|")[1])]
    assert sorted(names) == sorted(status)
    assert sorted(listed("field of a run")) == sorted(run)
    assert run["guard"] is not None
    assert sorted(listed("field of `guard`")) == sorted(run["guard"])


def alarm_of_the_guard(agent):
    """Return the alarm that begins a round of the guard."""
    dues = [due for _, _, due in agent._driver._alarm._pending]
    return next(due for due in dues if isinstance(due.task, health.GroupHealth))


def test_every_span_is_in_the_document():
    listed = [quoted(row[0])[0] for row in columns(TEXT, ["name", "measured by", "phase"])]
    code = "".join(path.read_text() for path in Path(ecckpt.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"""\.span\(\s*(?:"([a-z ]+)")""", code))
    named |= set(re.findall(r"""\.since\(\w+, "([a-z ]+)\"""", code))
    assert named <= set(listed)
    for name in listed:
        assert f'"{name}"' in code, name


# -- between the ranks ----------------------------------------------------------------------------


def test_examples_of_what_ranks_compare():
    text = ClusterConfig(
        run="r",
        code="auto",
        min_margin=None,
        every_steps=1,
        save_timeout_s=120.0,
        restore_timeout_s=300.0,
    ).fingerprint()
    assert f"\n{text}\n" in TEXT
    (example,) = re.findall(r"Example: `(.*)` has the form `([0-9a-f]{32})`", TEXT)
    form = form_of([("model.weight", torch.float32, (3, 4))])
    assert example == ("[('model.weight', 'torch.float32', (3, 4))]", form.hex())


# -- the token ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sent"), [({}, "0123456789abcdef"), ({"token": "x"}, "x"), ({"token": ""}, "")]
)
def test_open_takes_the_token_that_the_environment_names(tmp_path, monkeypatch, given, sent):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    monkeypatch.setenv("ECCKPT_TOKEN_FILE", str(file))
    seen = []

    class Client:
        def __init__(self, address, token, timeout_s):
            seen.append(token)
            self.address = address

        def node(self):
            raise errors.AgentUnreachable(self.address, "not there")

    monkeypatch.setattr(opening, "AgentClient", Client)
    with pytest.raises(errors.AgentUnreachable):
        ecckpt.open("test", ["127.0.0.1:1"], **given)
    assert seen == [sent]


# -- numbers and form -----------------------------------------------------------------------------


def test_limits_in_the_document():
    assert f"| body of a request | {REQUEST_LIMIT_BYTES >> 20} MiB" in TEXT
    assert f"| body of an answer | {MESSAGE_LIMIT_BYTES >> 20} MiB" in TEXT
    assert f"Protocol version {PROTOCOL_VERSION}." in TEXT
    assert f"  version: '{PROTOCOL_VERSION}'\n" in section(YAML, r"^info:$", r"^\S")
    limits = {row[0]: row[1] for row in columns(TEXT, ["what", "value"])}
    assert limits["server threads"] == str(daemon._THREADS)
    assert limits["`fetch` at a time"] == f"{fetch.FETCHES}, then 503"
    assert limits["`verify` at a time"] == f"{service._VERIFYING}, then 503"
    waiting = limits["pulls for `hold` at a time; `hold` requests waiting"]
    assert waiting == f"{hold.PULLS}; {hold._QUEUE_LIMIT} in all, then 503"
    waiting = limits["pulls for `prefetch` at a time; `prefetch` requests waiting"]
    assert waiting == f"{prefetch.PREFETCHES}; {prefetch._QUEUE_LIMIT}, then nothing is done"
    whole = limits["server: all of a request, body included"]
    assert whole.startswith(f"{deadlines.REQUEST_TIMEOUT_S:g} s,")
    assert f"(server: at most {deadlines.WATCH_LIMIT_S:g} s)" in limits["`watch`"]
    assert f"(every {deadlines.HEALTH_ROUND_S:g} s)" in TEXT
    assert f"more than {repair._MEMBERS_LIMIT} members" in TEXT


def test_yaml_is_plain():
    """No tabs, even indentation, and every reference leads somewhere."""
    for line in YAML.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        assert "\t" not in line
        assert indent % 2 == 0
        assert line == line.rstrip()
        assert line.count("{") == line.count("}")
        assert line.count("[") == line.count("]")
    for kind, name in set(re.findall(r"#/components/(\w+)/(\w+)'", YAML)):
        assert re.search(rf"^    {name}:", section(YAML, rf"^  {kind}:$", r"^  \w"), re.M), name


PAGES = ("PROTOCOL.md", "FORMAT.md", "EXPORT.md", "DCP.md", "openapi.yaml")


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_who_does_what(page):
    text = (DOCS / page).read_text()
    assert re.findall(r"(?i)\b(?:nobody|somebody|anybody|everybody|whoever)\b", text) == []
    assert re.findall(r"(?i)\bwhat is [^.,;|]{1,60} is\b", text) == []
