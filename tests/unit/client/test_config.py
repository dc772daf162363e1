"""Configuration: defaults, the environment, and what cannot be used."""

import math
from pathlib import Path

import pytest

from ecckpt.client.config import ClusterConfig, NodeConfig, read_token
from ecckpt.errors import InvalidConfig
from ecckpt.policy.retention import Keep

GOOD = {
    "run": "llama-70b",
    "code": "auto",
    "min_margin": 1,
    "every_steps": 10,
    "save_timeout_s": 60.0,
    "restore_timeout_s": 60.0,
}
VARIABLES = ["ROOT", "NODE", "DOMAIN", "LISTEN", "TOKEN_FILE", "ENGINE", "DISK"]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(f"ECCKPT_{name}", raising=False)


# -- the cluster ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": ""}, "run '' is not a usable name"),
        ({"run": "../other"}, "not a usable name"),
        ({"min_margin": -1}, "min_margin=-1 is negative"),
        ({"every_steps": 0}, "every_steps=0: at least 1"),
        ({"disk_every": -1}, "disk_every=-1 is negative"),
        ({"save_timeout_s": 0}, "save_timeout_s=0 is not between 0 and 1e6 s"),
        ({"save_timeout_s": -1.0}, "save_timeout_s=-1.0"),
        ({"restore_timeout_s": math.nan}, "restore_timeout_s=nan"),
        ({"restore_timeout_s": math.inf}, "restore_timeout_s=inf"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(change, words):
    with pytest.raises(InvalidConfig, match=words):
        ClusterConfig(**GOOD | change)


def test_a_fingerprint_tells_settings_apart():
    alike = {ClusterConfig(**GOOD).fingerprint() for _ in range(2)}
    changes = {
        "run": "other",
        "code": (8, 2),
        "min_margin": 2,
        "every_steps": 11,
        "save_timeout_s": 61.0,
        "restore_timeout_s": 61.0,
        "disk_every": 2,
        "keep": Keep(3),
    }
    others = {
        ClusterConfig(**GOOD | {name: value}).fingerprint() for name, value in changes.items()
    }
    assert len(alike) == 1
    assert len(others | alike) == 9


# -- the node -------------------------------------------------------------------------------------


def test_defaults():
    config = NodeConfig.from_environment()
    assert config.root.parts[:3] == ("/", "dev", "shm")
    assert config.root.name.startswith("ecckpt-")
    assert config.domain == config.node
    assert (config.listen, config.token_file, config.token()) == ("127.0.0.1:0", None, "")


def test_the_environment(monkeypatch):
    values = ["/mnt/fast", "n7", "rack-2", "10.0.0.7:7420", "/etc/token", "scalar", "/nvme"]
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(f"ECCKPT_{name}", value)
    config = NodeConfig.from_environment()
    assert config == NodeConfig(
        root=Path("/mnt/fast"),
        node="n7",
        domain="rack-2",
        listen="10.0.0.7:7420",
        token_file=Path("/etc/token"),
        engine="scalar",
        disk=Path("/nvme"),
    )


def test_an_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("ECCKPT_ROOT", "/mnt/fast")
    assert NodeConfig.from_environment("/mnt/other").root == Path("/mnt/other")


def test_empty_variables_count_as_none(monkeypatch):
    expected = NodeConfig.from_environment()
    for name in VARIABLES:
        monkeypatch.setenv(f"ECCKPT_{name}", "")
    assert NodeConfig.from_environment() == expected


def test_a_node_name_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setenv("ECCKPT_NODE", "rack 1/node 2")
    with pytest.raises(InvalidConfig, match="node 'rack 1/node 2' is not a usable name"):
        NodeConfig.from_environment()


# -- the token ------------------------------------------------------------------------------------


def token_file(folder, content, mode=0o600):
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def node_config(root, token):
    return NodeConfig(root=root, node="n", domain="d", listen="x:0", token_file=token)


@pytest.mark.parametrize(
    "content", [b"0123456789abcdef", b"0123456789abcdef\n", b" ~!@#$%^&*()_+{}|:\n"]
)
def test_a_token_is_what_the_file_holds(tmp_path, content):
    path = token_file(tmp_path, content)
    assert read_token(path) == content.decode().strip()
    assert node_config(tmp_path, path).token() == content.decode().strip()


def test_no_file_means_no_token():
    assert read_token(None) == ""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o602, 0o660])
def test_a_token_that_others_can_read_is_refused(tmp_path, mode):
    path = token_file(tmp_path, b"0123456789abcdef", mode)
    with pytest.raises(InvalidConfig, match="is readable by other users") as caught:
        read_token(path)
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 characters"),
        (b"0123456789abcde", "15 characters, at least 16"),
        (b"\n\n    \n", "0 characters"),
        (b"0123456789\nabcdef", "printable"),
        ("0123456789abcdef\u00e9".encode(), "printable ASCII"),
        (b"\xff\xfe" * 10, "codec can't decode"),
    ],
)
def test_a_token_that_cannot_be_one_is_refused(tmp_path, content, words):
    with pytest.raises(InvalidConfig, match=words) as caught:
        read_token(token_file(tmp_path, content))
    assert "0123456789" not in str(caught.value)


def test_a_missing_token_file_is_refused_by_name(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InvalidConfig, match=str(path)):
            read_token(path)
