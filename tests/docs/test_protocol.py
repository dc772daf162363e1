"""docs/PROTOCOL.md and docs/openapi.yaml against agent/app.py and wire/: nothing is left out."""

import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from ecckpt.agent.runtime import daemon, metrics
from ecckpt.agent.runtime import http_app as app
from ecckpt.format.fragment_file import Header
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.encoding import MESSAGE_LIMIT_BYTES, PROTOCOL_VERSION, REQUEST_LIMIT_BYTES
from ecckpt.protocol.verbs import VERBS
from tests.support.builders import message_classes

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
        assert list(hints.values()) == [verb.request], name


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


# -- paths ----------------------------------------------------------------------------------------


def test_every_verb_is_in_both():
    for verb, (body, answer, is_local) in verbs().items():
        row = section(TEXT, rf"^\| POST `/v1/runs/RUN/{verb}`", r"$")
        assert row.startswith(f" | {body} | {answer} |")
        assert ("socket only" in row) == is_local
        operation = section(YAML, rf"^  /v1/runs/{{run}}/{verb}:$", r"^  \S|^\S")
        assert "    post:" in operation
        assert f"tags: [{'socket' if is_local else 'peer'}]" in operation
        assert re.findall(r"schemas/(\w+)", operation) == [body, answer]


def test_every_other_path_is_in_both():
    whole, parts = literals()
    assert whole == {"/v1/node", "/v1/status", "/v1/shutdown", "/metrics"}
    reads = {name for name, verb in VERBS.items() if verb.is_read}
    looks = {f"/v1/runs/{{run}}/{look}" for look in reads}
    paths = whole | looks | {f"{SHARD}/table", f"{SHARD}/shard"}
    assert {"table", "shard"} <= parts
    paths |= {f"{SHARD}/fragments/{{index}}"}
    for path in paths:
        assert f"\n  {path}:\n" in YAML
        assert re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), path) in TEXT


def test_no_path_is_made_up():
    listed = set(re.findall(r"^  (/\S+):$", YAML, re.M))
    known = {f"/v1/runs/{{run}}/{verb}" for verb in verbs()} | literals()[0]
    assert listed - known == {
        "/v1/runs/{run}/inventory",
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
    assert re.findall(r"^### (\w+)$", TEXT, re.M) == listed


def test_header_travels_as_listed():
    generation = Generation(1, 2, "0" * 16)
    header = Header(ShardId("r", generation, 0), 1, 0, 1, 0, 0, 832, 4096, "n", None, 0)
    assert list(header.to_wire()) == messages()["Header"]


# -- numbers and form -----------------------------------------------------------------------------


def test_limits_in_the_document():
    assert f"| body of a request | {REQUEST_LIMIT_BYTES >> 20} MiB" in TEXT
    assert f"| body of an answer | {MESSAGE_LIMIT_BYTES >> 20} MiB" in TEXT
    assert f"Protocol version {PROTOCOL_VERSION}." in TEXT
    assert f"| server threads | {daemon._THREADS} |" in TEXT


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
