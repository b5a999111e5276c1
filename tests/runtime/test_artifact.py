"""The artifact: any byte altered, cut off or missing is one line that names the file; nobody ever sees half of one."""
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from infc.runtime import artifact, isa
from infc.runtime.artifact import read, verify_files
from infc.runtime.errors import RuntimeFault
from infc.runtime.manifest import FileInfo, WeightsInfo, decode, encode
from infc.runtime.session import load
from infc.runtime.storage import contained
from infc.runtime.tensors import tensor
from safetensors import safe_open


def files(path: Path) -> list[str]:
    return sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())


def use(path: Path) -> None:
    """Load and answer: what a service does."""
    with load(path, threads=2) as model:
        assert model.generate([1, 2, 3], max_tokens=2)


def rewrite_manifest(path: Path, **changes: object) -> None:
    """Alter the manifest and sign it again, as an attacker would."""
    manifest = decode((path / "manifest.json").read_bytes(), "test")
    (path / "manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, **changes)))


def test_what_is_in_it(fake):
    path = fake.write()
    names = files(path)
    assert [n for n in names if "/" not in n] == ["manifest.json", "report.json", "tokenizer.json", "weights.safetensors"]
    assert [n for n in names if "/" in n and not n.startswith("code/")] == [f"programs/step_T{t}.json" for t in (1, 64, 8)]
    manifest = read(path).manifest
    assert set(manifest.files) == set(names) - {"manifest.json"}
    assert [(b.name, b.steps) for b in manifest.buckets] == [("step_T1", 3), ("step_T8", 3), ("step_T64", 3)]
    assert str(fake.folder) not in (path / "manifest.json").read_text()
    verify_files(path).close()


def test_the_safetensors_package_reads_the_weights(fake):
    path = fake.write()
    with safe_open(path / "weights.safetensors", "np") as tensors:   # checks the whole header: no holes, no overlap
        assert np.array_equal(tensors.get_tensor("w"), fake.weight) and np.array_equal(tensors.get_tensor("big"), fake.big)
        assert tensors.get_slice("packed").get_dtype() == "BF16"
    assert all(place.start % 64 == 0 for name, place in read(path).places.items() if not name.startswith(".pad."))
    assert read(path).manifest.weights.data_offset % 64 == 0


@pytest.mark.parametrize("damage", ["empty", "half", "flip", "longer", "delete", "folder", "link"])
def test_every_damaged_file_is_named(fake, damage):
    good = fake.write("good.infc")
    for name in files(good):
        path = fake.folder / "bad.infc"
        shutil.copytree(good, path)
        file = path / name
        data = bytearray(file.read_bytes())
        if damage == "empty": file.write_bytes(b"")
        elif damage == "half": file.write_bytes(data[:len(data) // 2])
        elif damage == "longer": file.write_bytes(data + b"\0")
        elif damage == "flip":
            data[len(data) * 2 // 3] ^= 1
            file.write_bytes(data)
        else:
            file.rename(path / "moved")
            if damage == "folder": file.mkdir()
            if damage == "link": file.symlink_to(path / "moved")
        with pytest.raises(RuntimeFault) as caught:
            use(path)
        message = str(caught.value)
        assert name in message and str(path) in message and "\n" not in message, message
        shutil.rmtree(path)


def test_every_byte_of_the_manifest_counts(fake):
    path = fake.write()
    good = (path / "manifest.json").read_bytes()
    for at in range(0, len(good), 7):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 7
        (path / "manifest.json").write_bytes(bad)
        with pytest.raises(RuntimeFault, match=r"manifest\.json"):
            read(path)


def test_flips_anywhere_in_the_weights_are_found(fake):
    path = fake.write()
    good = (path / "weights.safetensors").read_bytes()
    start = read(path).manifest.weights.data_offset
    for at in (0, 9, start - 1, start, start + (1 << 20) - 1, start + (1 << 20), start + (1 << 21) + 5, len(good) - 1):
        bad = bytearray(good)
        bad[at] ^= 0x10
        (path / "weights.safetensors").write_bytes(bad)
        with pytest.raises(RuntimeFault, match=r"weights\.safetensors.*(altered|whole)"):
            use(path)
        with pytest.raises(RuntimeFault, match=r"weights\.safetensors"):
            verify_files(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "programs/../../secret", "a//b", ".", "..", "", "a/.", "./a", "a\\b", "a\0b"])
def test_names_stay_inside(fake, name):
    assert not contained(name)
    path = fake.write()
    (fake.folder / "secret").write_text("secret")
    rewrite_manifest(path, files=read(path).manifest.files | {name: FileInfo("0" * 64, 6)})
    with pytest.raises(RuntimeFault, match="leads outside the artifact"):
        read(path)


def test_a_linked_folder_is_not_followed(fake):
    path = fake.write()
    (path / "code").rename(fake.folder / "elsewhere")
    (path / "code").symlink_to(fake.folder / "elsewhere")
    with pytest.raises(RuntimeFault, match=r"code/.*links are not followed"):
        use(path)


def test_members_of_a_zip_that_lead_outside_are_nobodys(fake):
    """FIELD R33: a member is read by the name that the manifest gives a file, and never put anywhere."""
    path, packed = fake.write(), fake.folder / "packed.infc"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in files(path): archive.write(path / name, name)
        for name in ("../escaped", "/escaped", "programs/../../escaped"): archive.writestr(name, b"escaped")
    before = sorted(fake.folder.parent.rglob("*"))
    use(packed)
    verify_files(packed)
    assert sorted(fake.folder.parent.rglob("*")) == before
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_STORED) as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(files(path)[-1], b"a second one of that name")
    with pytest.raises(RuntimeFault, match=re.escape(files(path)[-1])): use(packed)


def test_a_hard_link_is_the_file_it_says_or_nothing(fake):
    """FIELD R33: what a file holds is hashed, whoever else holds it too."""
    path = fake.write()
    (fake.folder / "secret").write_bytes(b"secret")
    for name in files(path):
        good = (path / name).read_bytes()
        (path / name).unlink()
        (path / name).hardlink_to(fake.folder / "secret")
        with pytest.raises(RuntimeFault, match=re.escape(name)): use(path)
        (path / name).unlink()
        (path / name).write_bytes(good)
    use(path)
    assert (fake.folder / "secret").read_bytes() == b"secret"


def test_a_pickle_in_its_place_does_not_run(fake):
    marker = fake.folder / "marker"
    pickled = b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR."
    for name in files(fake.write()):
        path = fake.write(force=True)
        (path / name).write_bytes(pickled)
        with pytest.raises(RuntimeFault):
            use(path)
    assert not marker.exists()


def test_other_schemas_are_refused(fake):
    path = fake.write()
    rewrite_manifest(path, schema=99)
    with pytest.raises(RuntimeFault, match="has schema 99, this infc reads schema 2"):
        read(path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"isa": ("avx2", "infc_unheard_of")}, "needs infc_unheard_of, which this CPU .* lacks; .*infc compile --target "),
    ({"machine": "aarch64"}, "compiled for aarch64, this machine is "),
])
def test_a_cpu_without_the_isa_never_loads_the_code(fake, changes, message):
    fake.library += b"a file that no other test loads"
    path = fake.write()
    code = Path(read(path).manifest.code).name
    rewrite_manifest(path, **changes)
    with pytest.raises(RuntimeFault, match=message):
        load(path)
    assert code not in Path("/proc/self/maps").read_text()


def test_isa_names():
    old = isa.Cpu("Old CPU", "x86_64", frozenset(isa.LEVELS["x86-64-v3"]))
    with pytest.raises(RuntimeFault, match=r"needs AVX-512 BF16, which this CPU .*--target x86-64-v3"):
        isa.require(("avx2", "avx512_bf16"), "x86_64", "a.infc", old)
    isa.require(isa.LEVELS["x86-64-v3"], "x86_64", "a.infc", old)
    assert old.level() == "x86-64-v3"


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda p: {"buffers": (*p["buffers"][:-1], {**p["buffers"][-1], "bytes": 1 << 40})}, "the output logits takes .* outside its"),
    (lambda p: {"buffers": tuple({**b, "offset": -64} if b["kind"] == "arena" else b for b in p["buffers"])},
     "buffer kept, 32 bytes at -64, outside an arena"),
    (lambda p: {"buffers": tuple({**b, "tensor": "x"} if b["kind"] == "weight" else b for b in p["buffers"])}, "the weight x is not there"),
    (lambda p: {"steps": tuple({**s, "args": [99]} for s in p["steps"])}, "step 0 .* names buffer 99 of"),
    (lambda p: {"steps": tuple({**s, "kernel": "nope"} for s in p["steps"])}, "kernel nope is not there"),
])
def test_a_program_that_does_not_fit_is_refused(fake, spoil, message):
    path = fake.write()
    name = "programs/step_T8.json"
    program = json.loads((path / name).read_bytes())
    data = json.dumps(program | spoil(program)).encode()
    (path / name).write_bytes(data)
    import hashlib
    rewrite_manifest(path, files=read_files(path) | {name: FileInfo(hashlib.sha256(data).hexdigest(), len(data))})
    with load(path) as model, pytest.raises(RuntimeFault, match=message):
        model.generate([1, 2, 3])


def read_files(path: Path) -> dict[str, FileInfo]:
    return decode((path / "manifest.json").read_bytes(), "test").files


@pytest.mark.parametrize("header", [b"{}" + b" " * 62, b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,99999999]}}', b"\xff" * 64])
def test_a_crafted_safetensors_header_is_refused(fake, header):
    import hashlib

    path = fake.write()
    data = struct.pack("<Q", len(header)) + header + bytes(640)
    (path / "weights.safetensors").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    info = read_weights_info(path)
    rewrite_manifest(
        path, files=read_files(path) | {"weights.safetensors": FileInfo(digest, len(data))},
        weights=msgspec.structs.replace(info, data_offset=8 + len(header), data_bytes=640, crc32c=(1,),
                                        header_sha256=hashlib.sha256(data[:8 + len(header)]).hexdigest()),
    )
    with pytest.raises(RuntimeFault, match=r"weights\.safetensors|weight w is not there"):
        use(path)


def read_weights_info(path: Path) -> WeightsInfo:
    info = decode((path / "manifest.json").read_bytes(), "test").weights
    assert info is not None
    return info


def test_no_artifact_there(tmp_path):
    with pytest.raises(RuntimeFault, match="no such artifact; make one with: infc compile"):
        load(tmp_path / "none.infc")
    with pytest.raises(RuntimeFault, match=r"has no manifest\.json"):
        load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RuntimeFault, match="neither a folder nor a whole zip"):
        load(tmp_path / "file")


# ---- writing ---------------------------------------------------------------------------------------------------------------


def leftovers(folder: Path) -> list[str]:
    return [f.name for f in folder.iterdir() if f.name.startswith(".")]


def test_force_replaces_and_nothing_else_does(fake):
    path = fake.write(version="v1")
    with pytest.raises(RuntimeFault, match="exists already; add --force"):
        fake.write(version="v2")
    assert read(path).manifest.version == "v1"
    fake.write(version="v2", force=True)
    assert read(path).manifest.version == "v2" and leftovers(fake.folder) == []


def test_force_does_not_remove_what_is_no_artifact(fake):
    (fake.folder / "mine").mkdir()
    (fake.folder / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(RuntimeFault, match="is no infc artifact, so --force does not replace it"):
        fake.write("mine", force=True)
    assert (fake.folder / "mine" / "thesis.txt").exists()


def test_a_model_goes_on_after_its_artifact_was_replaced(fake):
    path = fake.write(version="v1")
    with load(path) as model:
        fake.write(version="v2", force=True)
        assert model.generate([1, 2, 3], max_tokens=40, ignore_eos=True)[0].token_ids == fake.answer([1, 2, 3], 40)


def test_no_folder_to_write_to(fake):
    with pytest.raises(RuntimeFault, match=r"the folder .* does not exist"):
        fake.write("none/a.infc")
    fake.write("b.infc")
    with pytest.raises(RuntimeFault, match=r"manifest.json is a file, not a folder"):
        fake.write("b.infc/manifest.json/a.infc")


def test_an_interrupted_write_leaves_nothing(fake, monkeypatch):
    from infc.runtime import writer

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "crc32c_chunks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fake.write()
    assert list(fake.folder.iterdir()) == []


WRITER = textwrap.dedent("""
    import pickle, resource, sys
    from pathlib import Path
    from infc.runtime import artifact
    from infc.runtime.errors import RuntimeFault
    parts, path, force, limit, rounds = pickle.loads(sys.stdin.buffer.read())
    if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for _ in range(rounds):
        try: artifact.write(path, parts, force)
        except RuntimeFault as fault: print(fault, flush=True)
        else: print("written", flush=True)
""")


def start_writer(fake, path: Path, *, force: bool = False, limit: int = 0, rounds: int = 1, **options: object) -> subprocess.Popen[str]:
    import pickle

    parts = fake.parts(**options)
    parts = parts._replace(weights={k: v._replace(data=bytes(memoryview(v.data).cast("B"))) for k, v in parts.weights.items()})
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdin
    process.stdin.write(pickle.dumps((parts, path, force, limit, rounds)))
    process.stdin.close()
    return process


@pytest.mark.parametrize("limit", [1, 1000, 5000, 100_000, 2_000_000, 3_000_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(fake, limit):
    path = fake.folder / "full.infc"
    process = start_writer(fake, path, limit=limit)
    output = process.stdout.read().decode()
    assert process.wait(60) == 0 and output.count("\n") == 1
    assert "no space left on the device (about 2 MiB are needed); nothing was written" in output
    assert list(fake.folder.iterdir()) == []


@pytest.mark.parametrize(("size", "told"), [(0, "0 kB"), (1, "1 kB"), (586_752, "587 kB"), (1 << 20, "1 MiB"), (5 << 20, "5 MiB")])
def test_what_a_full_disk_lacks_is_told_in_its_own_unit(size, told):
    from infc.runtime import writer

    assert writer._rough(size) == told


def test_a_killed_writer_leaves_no_half_artifact(fake):
    path = fake.folder / "killed.infc"
    for _ in range(5):
        process = start_writer(fake, path, force=True, rounds=10_000)
        assert process.stdout.readline() == b"written\n"
        time.sleep(random.uniform(0, 0.05))                          # somewhere within the next writes
        process.kill()
        process.wait(60)
        process.stdout.close()
        verify_files(path).close()
    (fake.folder / ".killed.infc.partial-1-00000000").mkdir()
    (fake.folder / ".other.infc.partial-1-00000000").mkdir()
    fake.write("killed.infc", force=True)
    assert leftovers(fake.folder) == [".other.infc.partial-1-00000000"]
    use(path)


def test_a_folder_swept_before_it_is_locked_is_made_again(fake, monkeypatch):
    real, taken = os.open, []

    def opened(path, *given, **more):
        if ".partial-" in str(path) and not taken:
            taken.append(path)
            Path(path).rmdir()
        return real(path, *given, **more)

    monkeypatch.setattr(os, "open", opened)
    fake.write("raced.infc")
    assert len(taken) == 1
    use(fake.folder / "raced.infc")


def test_two_writers_and_a_reader(fake):
    path = fake.folder / "shared.infc"
    first = start_writer(fake, path, version="a")
    second = start_writer(fake, path, version="b")
    lines = [p.stdout.read().decode().strip() for p in (first, second)]
    assert first.wait(60) == second.wait(60) == 0
    assert sorted(line == "written" for line in lines) == [False, True] and "exists already" in "".join(lines)
    writers = [start_writer(fake, path, version=v, force=True, rounds=6) for v in ("a", "b")]
    reads = 0
    while any(w.poll() is None for w in writers):
        with verify_files(path) as found:
            assert found.manifest.version in ("a", "b")
        reads += 1
    for writer in writers:
        assert set(writer.stdout.read().decode().split()) == {"written"}
    assert reads and leftovers(fake.folder) == []


def test_a_tensor_that_is_not_what_it_says_is_refused(fake):
    parts = fake.parts()
    bad = {**parts.weights, "w": tensor(fake.weight)._replace(shape=(3,))}
    with pytest.raises(ValueError, match=r"tensor w: i32\[3\] is 12 bytes, got 2048"):
        artifact.write(fake.folder / "bad.infc", parts._replace(weights=bad))
    assert list(fake.folder.iterdir()) == []


# ---- one zip ---------------------------------------------------------------------------------------------------------------
