"""``ecckpt export`` and ``import``: folders that others load, whole or not there at all."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard

from ecckpt import cli
from ecckpt.cli.argument_types import size_of
from ecckpt.errors import (
    InvalidConfig,
    InvalidFolder,
    StateMismatch,
    UnsupportedState,
    VersionMismatch,
)
from ecckpt.integrations.safetensors import export as exporting
from ecckpt.integrations.safetensors.export import export_safetensors
from ecckpt.integrations.safetensors.importer import import_safetensors, read_weights
from ecckpt.integrations.safetensors.index import INDEX, MANIFEST, SINGLE
from ecckpt.state.tensors.dtypes import CODE_OF
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.commands import leftovers, run
from tests.support.stored import as_ranks, distribute, opened, shard_bytes, store
from tests.support.tensors import random, same
from tests.support.worlds import World

RAW = torch.arange(64, dtype=torch.uint8) % 2


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=6) as cluster:
        yield cluster


def weights(rank=0):
    """One of each kind that files can hold, sharded where a process group says so."""
    tensors = {f"dtype.{str(dtype)[6:]}": RAW.view(dtype).reshape(2, -1) for dtype in CODE_OF}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "bias": random(5)}
    tensors["layers.0.weight"] = random(9, 50)
    tensors["layers.1.weight"] = random(9, 50, seed=1)
    return tensors


def save(cluster, run, model, **state):
    store(cluster, [shard_bytes({"model": model, "optim": {"m": random(4)}, **state})], run=run)
    return opened(cluster, run)


# -- export ---------------------------------------------------------------------------------------


def test_one_file_that_everybody_loads(cluster, tmp_path):
    found = save(cluster, "one", weights())
    done = export_safetensors(found, tmp_path / "a" / "out")
    assert leftovers(tmp_path / "a" / "out") == [MANIFEST, SINGLE]
    loaded = load_file(tmp_path / "a" / "out" / SINGLE)
    assert loaded.keys() == weights().keys()
    assert all(same(loaded[name], tensor) for name, tensor in weights().items())
    with safe_open(tmp_path / "a" / "out" / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("layers.0.weight")[2:3].tolist() == random(9, 50)[2:3].tolist()
    assert (done.files, done.tensors) == ((SINGLE,), len(weights()))
    assert done.total_bytes == sum(tensor.nbytes for tensor in weights().values())


def test_several_files_index_and_manifest(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_PIECE_BYTES", 500)  # two rows at a time

    def state(rank):
        parts = {name: t for name, t in weights().items() if t.dim() and t.numel()}
        return {"model": {name: distribute(tensor, [Shard(0)]) for name, tensor in parts.items()}}

    store(cluster, as_ranks(3, state), run="several")
    done = export_safetensors(opened(cluster, "several"), tmp_path / "out", max_file_bytes=2000)
    count = len(done.files)
    assert count >= 3
    assert done.files[1] == f"model-00002-of-{count:05d}.safetensors"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": done.total_bytes}
    for file in done.files:
        loaded = load_file(tmp_path / "out" / file)
        assert sorted(loaded) == sorted(n for n, f in index["weight_map"].items() if f == file)
        assert all(same(tensor, weights()[name]) for name, tensor in loaded.items())
        assert len(loaded) == 1 or sum(tensor.nbytes for tensor in loaded.values()) <= 2000
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["files"].keys() == {*done.files, INDEX}
    for file, facts in manifest["files"].items():
        content = (tmp_path / "out" / file).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_tied_tensors_are_written_once_and_tied_again(cluster, tmp_path):
    weight = random(6, 4)
    model = {"wte.weight": weight, "lm_head.weight": weight, "untied": weight.clone()}
    done = export_safetensors(save(cluster, "tied", model), tmp_path / "one")
    assert done.aliases == {"lm_head.weight": "wte.weight"}
    assert load_file(tmp_path / "one" / SINGLE).keys() == {"wte.weight", "untied"}
    export_safetensors(opened(cluster, "tied"), tmp_path / "two", max_file_bytes=1)
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 192, "lm_head.weight": "wte.weight"}
    for folder in ("one", "two"):
        loaded = read_weights(tmp_path / folder)
        assert loaded.keys() == model.keys()
        assert loaded["lm_head.weight"] is loaded["wte.weight"]
        assert loaded["untied"].data_ptr() != loaded["wte.weight"].data_ptr()


def test_a_tensor_tied_to_one_that_is_not_exported(cluster, tmp_path):
    weight = random(3)
    store(cluster, [shard_bytes({"ema": {"w": weight}, "model": {"w": weight}})], run="ema")
    export_safetensors(opened(cluster, "ema"), tmp_path / "out")
    assert same(load_file(tmp_path / "out" / SINGLE)["w"], weight)
    everything = export_safetensors(opened(cluster, "ema"), tmp_path / "all", prefix="")
    assert everything.aliases == {"model.w": "ema.w"}


def test_a_folder_in_use_is_left_alone(cluster, tmp_path):
    found = save(cluster, "again", {"x": random(3)})
    (tmp_path / "out").mkdir()
    export_safetensors(found, tmp_path / "out")  # an empty one is as good as none
    before = (tmp_path / "out" / SINGLE).read_bytes()
    for place in (tmp_path / "out", tmp_path / "out" / SINGLE, tmp_path):
        with pytest.raises(InvalidConfig, match="not an empty folder"):
            export_safetensors(found, place)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidConfig, match="not an empty folder"):
        export_safetensors(found, tmp_path / "link")
    assert (tmp_path / "out" / SINGLE).read_bytes() == before
    assert leftovers(tmp_path) == ["link", "out"]


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ({"x": torch.zeros(2, dtype=torch.complex128)}, UnsupportedState, "model.x: .*complex128"),
        ({}, InvalidConfig, "begins with 'model.' .*in optim"),
        ({"__metadata__": torch.zeros(2)}, InvalidConfig, "cannot be names"),
    ],
)
def test_what_cannot_be_exported(cluster, tmp_path, model, error, words):
    run = f"cannot-{words[:3].strip('.')}"
    with pytest.raises(error, match=words):
        export_safetensors(save(cluster, run, model), tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_an_export_that_fails_leaves_nothing(cluster, tmp_path):
    shards = [shard_bytes({"model": {"same": random(4), "x": random(3, seed=r)}}) for r in (0, 1)]
    store(cluster, shards, run="fails")
    with pytest.raises(StateMismatch, match=r"model.x: rank 1"):
        export_safetensors(opened(cluster, "fails"), tmp_path / "out")
    assert leftovers(tmp_path) == []
    export_safetensors(opened(cluster, "fails").as_rank(1), tmp_path / "out")
    assert same(load_file(tmp_path / "out" / SINGLE)["x"], random(3, seed=1))


# -- import ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(cluster, tmp_path):
    """An export of three files."""
    name = f"folder-{tmp_path.name[:40]}"
    model = {"a": random(4, 4), "b": random(4, 4, seed=1), "c": torch.tensor(3)}
    done = export_safetensors(save(cluster, name, model), tmp_path / "out", max_file_bytes=64)
    assert len(done.files) == 3
    return tmp_path / "out"


def rewrite(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def test_a_module_is_restored_from_an_import(cluster1, cluster, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    model[0].weight.data.mul_(3)
    export_safetensors(save(cluster, "module", model), tmp_path / "out", max_file_bytes=100)
    done = import_safetensors("module", tmp_path / "out", root=cluster1.root("n0"), step=12)
    assert (done.tensors, done.generation[:5]) == (7, "1.12.")
    assert done.total_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert "one node" in done.promise
    found = opened(cluster1, "module")
    assert same(found["model.0.weight"], model[0].weight.detach())
    blank = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    with World(cluster1, run="module") as world:
        (restored,) = world.restore([{"model": blank}])
    assert restored.step == 12
    assert all(
        same(x, y)
        for x, y in zip(blank.state_dict().values(), model.state_dict().values(), strict=True)
    )
    with pytest.raises(InvalidConfig, match="node n0 knows run 'module' already"):
        import_safetensors("module", tmp_path / "out", root=cluster1.root("n0"))


def test_ties_that_a_folder_does_not_tell(cluster1, folder):
    root = cluster1.root("n0")
    for ties in ({"a": "b"}, {"d": "e"}):
        with pytest.raises(InvalidConfig, match="cannot be tied"):
            import_safetensors("ties", folder, root=root, ties=ties)
    assert import_safetensors("ties", folder, root=root, ties={"d": "a"}).tensors == 4
    assert opened(cluster1, "ties").aliases == {"model.d": "model.a"}


def break_index(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text[: len(text) // 2])


def break_shard(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "model-00002-of-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop_b(fields):
    fields["weight_map"]["zz"] = fields["weight_map"].pop("b")


def escape(fields):
    fields["weight_map"]["b"] = "../out/model-00002-of-00003.safetensors"


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize(
    ("harm", "words", "needs_manifest"),
    [
        (break_index, "index.json cannot be read", False),
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), "named in the index", False),
        (lambda f: (f / INDEX).unlink(), "neither", False),
        (
            lambda f: (f / SINGLE).write_bytes(b""),
            "model.safetensors is in the folder, but not",
            False,
        ),
        (
            lambda f: (f / "model-00004-of-00004.safetensors").write_bytes(b""),
            "model-00004-of-00004.safetensors is in the folder, but not named",
            False,
        ),
        (
            lambda f: rewrite(f / INDEX, lambda fields: fields.pop("weight_map")),
            "weight_map",
            False,
        ),
        (lambda f: rewrite(f / INDEX, escape), "is not a file name", False),
        (lambda f: rewrite(f / INDEX, drop_b), "changed|has no tensor 'zz'|another length", False),
        (break_shard, "another length in|cannot be read", False),
        (flip, "SHA-256", True),
    ],
)
def test_folders_that_are_not_whole(folder, harm, words, needs_manifest, manifest):
    if not manifest:
        (folder / MANIFEST).unlink()
    harm(folder)
    if needs_manifest and not manifest:
        assert len(read_weights(folder)) == 3
        return
    with pytest.raises(InvalidFolder, match=words):
        read_weights(folder)


def test_manifests_of_another_time(folder):
    rewrite(folder / MANIFEST, lambda fields: fields["files"].pop(INDEX))
    rewrite(
        folder / MANIFEST, lambda fields: fields["files"].pop("model-00001-of-00003.safetensors")
    )
    with pytest.raises(InvalidFolder, match="does not have model-00001"):
        read_weights(folder)
    rewrite(folder / MANIFEST, lambda fields: fields["files"].update({"../x": {}}))
    with pytest.raises(InvalidFolder):
        read_weights(folder)
    rewrite(folder / MANIFEST, lambda fields: fields.update(format=2))
    with pytest.raises(VersionMismatch, match="format version 2"):
        read_weights(folder)
    rewrite(folder / MANIFEST, lambda fields: fields.pop("format"))
    with pytest.raises(InvalidFolder, match="not a manifest"):
        read_weights(folder)


def test_other_files_and_other_peoples_folders(folder):
    for name in (MANIFEST, "config.json", "consolidated.safetensors", "tokenizer.json"):
        (folder / name).write_text("anything")
    (folder / MANIFEST).unlink()
    rewrite(folder / INDEX, lambda fields: fields["metadata"].update(total_parameters=9, note="a?"))
    assert read_weights(folder).keys() == {"a", "b", "c"}
    rewrite(folder / INDEX, lambda fields: fields.pop("metadata"))
    assert read_weights(folder).keys() == {"a", "b", "c"}
    with pytest.raises(InvalidFolder, match="is not a folder"):
        read_weights(folder / "nowhere")


# -- commands -------------------------------------------------------------------------------------


def test_there_and_back_by_command(capsys, cluster, cluster1, tmp_path):
    save(cluster, "there", weights())
    folder = tmp_path / "out"
    export = ("export", "there", *cluster.addresses(), "--to", "safetensors", folder)
    status, out, err = run(capsys, *export, "--max-shard-bytes", "1KB", "--json")
    done = json.loads(out)
    assert (status, err, done["tensors"]) == (0, "", len(weights()))
    root = ("--root", cluster1.root("n0"))
    status, out, err = run(capsys, "import", "back", folder, *root, "--step", "3")
    assert (status, err) == (0, "")
    assert f"{len(weights())} tensors, {done['total_bytes']:,} bytes as generation 1.3." in out
    found = opened(cluster1, "back")
    assert all(same(found[f"model.{name}"], tensor) for name, tensor in weights().items())
    status, out, err = run(capsys, *export)
    assert (status, out) == (2, "")
    assert err.startswith(f"ecckpt: InvalidConfig: {folder} exists, and is not an empty folder")
    status, out, err = run(capsys, "import", "back", folder, *root, "--json")
    assert (status, out) == (2, "")
    assert "knows run 'back' already" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "run", "127.0.0.1:1", "--to", "safetensors", "x"), "AgentUnreachable"),
        (("export", "run", "127.0.0.1:1", "--to", "zip", "x"), "InvalidConfig: --to zip"),
        (("import", "run", "/nowhere"), "InvalidFolder: /nowhere is not a folder"),
        (("import", "../run", "/nowhere"), "InvalidConfig: run '../run'"),
        (("import", "run", "/nowhere", "--tie", "a=b"), "InvalidFolder: /nowhere is not a folder"),
    ],
)
def test_commands_that_fail(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"ecckpt: {words}")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1000", 1000), ("2 K", 2000), ("1TiB", 1 << 40)],
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("tie", ["a", "=b", "a="])
def test_ties_that_are_none(capsys, tie):
    with pytest.raises(SystemExit):
        cli.main(["import", "run", "folder", "--tie", tie])
    assert "is not NAME=STORED" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "GB", "5XB", "-1", "1.5GB", "9" * 20])
def test_sizes_that_are_none(capsys, text):
    command = ["export", "r", "h:1", "--to", "safetensors", "x", f"--max-shard-bytes={text}"]
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "is not a size" in capsys.readouterr().err
