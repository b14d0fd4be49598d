import engine_actor  # noqa: F401  (before torch: it sets how OpenMP's threads wait)
