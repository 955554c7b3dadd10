"""nbval: never compare stderr, where progress bars and new warnings of libraries go."""


def pytest_collectstart(collector):
    if getattr(collector, "skip_compare", None):
        collector.skip_compare += ("stderr",)
