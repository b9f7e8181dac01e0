"""The contract on a server that speaks S3, behind a network that loses requests and replies."""

from __future__ import annotations

import pytest

from trajectory_store import StoreError, TrajectoryStore

from ..crash._s3 import missing, serve
from .contract import StoreContract

pytestmark = [
    pytest.mark.crash,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


class TestRoughS3(StoreContract):
    """503s, cut connections, lost replies and late requests: the store settles each of them by itself.

    Each test has a prefix of its own.
    """

    @pytest.fixture(autouse=True)
    def _bucket(self, rough):
        rough.rough()
        self.bucket = rough

    def url(self, path):
        """The place in the bucket that stands for a path."""
        return f"{self.bucket.url}/{'-'.join(path.parts[-2:])}"

    def create(self, path, schema, **options):
        """Make a store."""
        return TrajectoryStore.create(self.url(path), schema, **options)

    def open(self, path, mode="r"):
        """Open a store."""
        return TrajectoryStore.open(self.url(path), mode)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A bucket that only takes its time."""
    with serve(tmp_path_factory.mktemp("calm"), faults={}) as rig:
        yield rig


@pytest.fixture(scope="module")
def rough(tmp_path_factory):
    """A bucket behind every fault that a client may repeat a request after."""
    with serve(tmp_path_factory.mktemp("rough"), seed=1) as rig:
        yield rig


def test_a_commit_is_one_object_and_one_request(calm):
    """Appends of 64 rows: an object each, with a catalogue that grows far more slowly."""
    import obstore

    from .contract import example_rows, example_schema

    calm.rough()
    url = f"{calm.url}/objects"
    with TrajectoryStore.create(url, example_schema()) as store:
        for seed in range(20):
            store.append(example_rows(64, seed=seed))
        folder = obstore.store.from_url(url)
        count = sum(len(page) for page in obstore.list(folder))
    assert count <= 20 + 13, count  # a record of the catalog is two objects, and so is the metadata of the segment


def test_a_bucket_that_is_not_there_is_an_error_of_the_store(calm):
    """The message names the URL."""
    calm.rough()
    for url in ("s3://no-such-bucket/run", f"{calm.url}/nothing"):
        with pytest.raises(StoreError, match=url):
            TrajectoryStore.open(url)
