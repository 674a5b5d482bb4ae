from bench.lab.image_loading import measure


def test_a_tiny_run_measures_every_way() -> None:
    result = measure(4 << 20, 2)
    assert result.nbytes == 4 << 20
    assert all(getattr(result, name) > 0 for name in result.__struct_fields__)
