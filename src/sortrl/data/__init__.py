"""States to learn from, each with the teacher's answer: collected, kept, exported."""

from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import load_demonstrations, merge, save_demonstrations, split

__all__ = ["CollectConfig", "collect", "load_demonstrations", "merge", "save_demonstrations", "split"]
