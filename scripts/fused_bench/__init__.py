"""Parts of scripts/bench_fused.py."""
