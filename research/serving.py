"""Load on a server: clients that ask at once, for a while, some of whom leave in the middle.

    python research/serving.py [MODEL] --clients 64 --seconds 60 --out serving.jsonl

Starts `bd3lm serve` on this machine, and prints seconds to the first text, tokens a second and the server's
memory. Some texts, drawn at random, are written again by `lm.generate` and compared.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bd3lm.lm import LanguageModel
from tests.serving import serving
from tests.serving.load import Load, compared, memory, percentiles


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="box")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--leaving", type=float, default=1 / 3, help="the share of requests that are left")
    parser.add_argument("--compare", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with serving(arguments.model, "--queue", str(2 * arguments.clients)) as server:
        server.post(prompt="a", max_tokens=8)
        before = memory(server)
        load = Load(
            server.url, clients=arguments.clients, seconds=arguments.seconds, leaving=arguments.leaving
        )
        began = time.monotonic()
        asyncio.run(load.run())
        seconds = time.monotonic() - began
        server.until(10, lambda: server.texts() == 0)
        after = memory(server)
        lm = LanguageModel.from_pretrained(arguments.model, device="cpu")
        compared_to = min(arguments.compare, len(load.done))
        found = {
            "model": arguments.model,
            "clients": arguments.clients,
            "seconds": round(seconds, 1),
            "finished": len(load.done),
            "left": load.left,
            "refused": load.refused,
            "tokens_per_second": round(load.tokens / seconds, 1),
            "first_text": percentiles(load.first),
            "between_texts": percentiles(load.between),
            "whole": percentiles(load.whole),
            "compared": compared_to,
            "right": compared(lm, load.done, compared_to),
            "memory_before": round(before),
            "memory_after": round(after),
        }
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    if found["right"] != found["compared"]:
        sys.exit("texts differ from those of generate")


if __name__ == "__main__":
    main()
