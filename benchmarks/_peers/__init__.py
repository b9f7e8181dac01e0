"""One adapter per store: the benchmarks append to all of them and sample from all of them alike."""

from __future__ import annotations

from _peers.arrow import Arrow, DuckDb, HuggingFace, Lance
from _peers.base import Peer
from _peers.keyed import Lmdb, PlainZarr
from _peers.ours import Ours, OursZarr
from _peers.torchrl_storages import LazyMemmap, LazyStack

PEERS: list[type[Peer]] = [Ours, OursZarr, LazyStack, LazyMemmap, PlainZarr, Arrow, HuggingFace, Lmdb, Lance, DuckDb]
