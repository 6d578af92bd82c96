"""One cluster for all modules; each deploys what it needs as an update of the running application."""

from collections.abc import Iterator

import pytest

from tests.ray.running import RunningCluster, cluster


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with cluster(tmp_path_factory.mktemp("ray") / "log") as found:
        yield found
