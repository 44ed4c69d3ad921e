"""What the tests of `iclperm.base.worker` let its process call; imports little, so that it starts fast."""

import os
import sys
import time
from pathlib import Path


def double(payload):
    return payload * 2


def surroundings(_):
    return {"pid": os.getpid(), "group": os.getpgid(0), "keys": sorted(os.environ), "modules": sorted(sys.modules)}


def print_much(_):
    print('{"result": "forged"}\n' * 1000)
    os.write(1, b"more")
    return "true"


def misbehave(how):
    match how.partition(" "):
        case "spin", _, "":
            while True:
                pass
        case "spin", _, "in C":
            return sum(range(10**18))
        case "sleep", _, _:
            time.sleep(1000)
        case "fork", _, note:  # the child stays in the group, and holds the pipes open
            Path(note).write_text(str(os.fork() or os.getpid()))
            time.sleep(1000)
        case "die", _, _:
            os._exit(7)
        case "exit", _, _:
            sys.exit(3)
        case "hoard", _, _:
            return len(bytearray(1 << 40))
        case "set", _, _:
            return {1, 2}
        case "much", _, _:
            return "x" * (17 << 20)
    raise ValueError(f"no such\nthing: {how}")
