"""What a node of 8 ranks measures in one window, as the benchmarks of the bus feed it."""

from dynamix.schemas.messages import (
    GlobalMetrics,
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    RankMetrics,
    SystemMetrics,
    TrainingMetrics,
)

NUM_RANKS = 8


def metric_window() -> MetricWindow:
    """What a node of 8 ranks measures in one window."""
    ranks = tuple(
        RankMetrics(
            rank=rank,
            training=TrainingMetrics(
                local_batch_size=96 + 8 * rank,
                pending_local_batch_size=104 + 8 * rank,
                num_samples=20 * (96 + 8 * rank),
                loss=1.2 + rank / 100,
                accuracy=0.55 + rank / 1000,
                accuracy_change=0.004,
                step_time_s=0.085,
                compute_time_s=0.05 + rank / 500,
                sync_time_s=0.02,
                data_time_s=0.004,
                update_time_s=0.006,
            ),
            system=SystemMetrics(cpu_time_ratio=1.4, memory_bytes=3 << 30, memory_ratio=0.11),
            network=NetworkMetrics(tx_bytes=48_123_456, rx_bytes=47_987_654, retransmits=rank, srtt_us=212.5),
        )
        for rank in range(NUM_RANKS)
    )
    job = GlobalMetrics(
        global_batch_size=992,
        num_samples=19_840,
        step_time_s=0.085,
        throughput=11_670.6,
        loss=1.23,
        loss_change=-0.02,
        accuracy=0.553,
        accuracy_change=0.004,
        held_out_accuracy=0.541,
        progress=0.2,
        noise_scale=1834.0,
        sigma_norm_sq=1.85,
    )
    return MetricWindow(
        job="bench-0a1b2c3d",
        generation=0,
        window=0,
        node="node-a",
        probe="tcp_info",
        optimizer_family="sgd",
        num_steps=20,
        ranks=ranks,
        job_metrics=job,
        node_metrics=NodeMetrics(load_per_cpu=0.7, memory_used_ratio=0.4),
    )
