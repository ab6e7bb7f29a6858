"""Whatever configurations, folders and files hold: only our own errors, short ones, and soon.

A sample; ``python -m tests.mutate 10000 2000`` takes longer.
"""

import pytest

from tests.mutate import configs, files


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mutate", "count", "taken"), [(configs, 150, 1 / 20), (files, 200, 1 / 100)])
def test_only_our_own_errors(mutate, count, taken):
    tally = mutate(count, seed=11)
    assert tally.wrong == []
    assert sum(n for (_, what), n in tally.counts.items() if what == "refused") > count / 2
    assert sum(n for (_, what), n in tally.counts.items() if what == "taken") > count * taken
