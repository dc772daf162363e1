"""What Prometheus reads of an agent."""

import re

from ecckpt.agent.runtime.metrics import exposition


def facts(**more):
    return {
        "committed": "3.81240.0123456789abcdef",
        "guard": None,
        "home_copies": 2,
        "fragments": 7,
        "used_bytes": 4096,
        "disk_bytes": 0,
        "damaged": {},
        "rejected": {"a file": "why"},
    } | more


def test_exposition():
    guard = {"margin": 2, "missing": 1, "lost": ["n3"], "repaired": 4}
    runs = {"llama-70b": facts(guard=guard), "new": facts(committed="")}
    lines = exposition({"runs": runs}).splitlines()
    assert 'ecckpt_margin_nodes{run="llama-70b"} 2' in lines
    assert 'ecckpt_fragments_missing{run="llama-70b"} 1' in lines
    assert 'ecckpt_holders_lost{run="llama-70b"} 1' in lines
    assert 'ecckpt_repairs_total{run="llama-70b"} 4' in lines
    assert 'ecckpt_committed_step{run="llama-70b"} 81240' in lines
    assert [line for line in lines if 'run="new"' in line] == [
        'ecckpt_home_copies{run="new"} 2',
        'ecckpt_fragments{run="new"} 7',
        'ecckpt_used_bytes{run="new"} 4096',
        'ecckpt_disk_bytes{run="new"} 0',
        'ecckpt_files_damaged{run="new"} 0',
        'ecckpt_files_rejected{run="new"} 1',
    ]
    for line in lines:
        assert re.fullmatch(r'# (HELP|TYPE) ecckpt_\w+ .+|ecckpt_\w+\{run="[\w.-]+"\} -?\d+', line)


def test_a_margin_that_is_not_known_is_not_shown():
    guard = {"margin": None, "missing": 5, "lost": [], "repaired": 0}
    assert "margin_nodes{" not in exposition({"runs": {"run": facts(guard=guard)}})
    assert exposition({"runs": {}}).endswith("\n")
