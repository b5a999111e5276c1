"""The runtime stands alone: load and generate import no framework, and nothing of infc but infc.runtime."""
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent("""
    import sys
    from infc.runtime.session import load
    with load(sys.argv[1]) as model:
        assert model.generate([1, 2, 3], max_tokens=3)[0].token_ids
        early = set(sys.modules)
        assert model.generate("text", max_tokens=3, chat=True)[0].prompt_tokens > 4
    late = set(sys.modules)
    foreign = {"torch", "triton", "transformers", "rich", "typer", "safetensors", "networkx", "gguf"}
    print(sorted(foreign & late))
    print(sorted({"jinja2"} & early))
    print(sorted(m for m in late if m.startswith("infc.") and not m.startswith("infc.runtime")))
""")


def test_what_a_service_imports(fake):
    path = fake.write(template="{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}")
    found = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, timeout=60)
    assert found.stdout == "[]\n[]\n[]\n", found.stdout + found.stderr
