"""Plant faults and print who caught them: `PYTHONPATH=tests python -m mutations [WORD ...]`, those whose kind or name has a word."""
import sys

from mutations.faults import FAULTS
from mutations.verdict import verdict


def main(words: list[str]) -> int:
    """1 where a fault escaped."""
    chosen = [fault for fault in FAULTS if not words or any(word in f"{fault.kind} {fault.name}" for word in words)]
    caught: dict[str, int] = {}
    print("fault | where | gate | message")
    for fault in chosen:
        found = verdict(fault)
        gate = found.gate if found else "ESCAPED"
        caught[gate] = caught.get(gate, 0) + 1
        print(f"{fault.kind}: {fault.name} | {fault.where} | {gate} | {found.message[:160] if found else ''}", flush=True)
    escaped = caught.pop("ESCAPED", 0)
    print(f"caught {len(chosen) - escaped} / {len(chosen)}: {', '.join(f'{count} by {gate}' for gate, count in caught.items())}")
    return int(escaped > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
