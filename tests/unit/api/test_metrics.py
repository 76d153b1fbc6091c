"""The API counts in plain numbers and shows them as Prometheus reads counters and histograms."""

from prometheus_client import generate_latest

from api.metrics import Metrics


def test_times_are_a_cumulative_histogram_and_requests_a_counter():
    """A time at the bound of a bucket belongs to it, and one beyond all bounds is in +Inf alone."""
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.3, 9.0):
        metrics.answered("put_cell", 201, seconds)
    metrics.put_stage("trips", "home", 0.002)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'schemaless_api_requests_total{route="put_cell",status="201"} 4.0',
        'schemaless_api_request_seconds_bucket{le="0.001",route="put_cell"} 2.0',
        'schemaless_api_request_seconds_bucket{le="0.25",route="put_cell"} 2.0',
        'schemaless_api_request_seconds_bucket{le="0.5",route="put_cell"} 3.0',
        'schemaless_api_request_seconds_bucket{le="5.0",route="put_cell"} 3.0',
        'schemaless_api_request_seconds_bucket{le="+Inf",route="put_cell"} 4.0',
        'schemaless_api_request_seconds_count{route="put_cell"} 4.0',
        'schemaless_api_request_seconds_sum{route="put_cell"} 9.3015',
        'schemaless_api_put_stage_seconds_bucket{datastore="trips",le="0.0025",stage="home"} 1.0',
    ):
        assert line in text
