"""What the server's start decides and its pages read: folder, architectures, limits, colours."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

COOKIE = "deepseal_browser"
KEPT_SECONDS = 7 * 24 * 3600  # after the last visit
_VARIABLE = "DEEPSEAL_DASHBOARD"

# Okabe and Ito's palette (2008), told apart with every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
GOOD, BAD, UNSURE, PLAIN = "#0072B2", "#D55E00", "#E69F00", "#6B7280"
# From none to all, from light to dark: readable without colour (cividis, Nuñez et al., 2018).
SHARES = ("#FDEA45", "#C8B866", "#8E8978", "#575C6D", "#00224E")

THEME: dict[str, Any] = {
    "theme.headingFontSizes": ["2.5rem", "1.75rem", "1.5rem"],
    "theme.light.textColor": "#101214",  # captions are shown at 60 % of it, and still have contrast
    "theme.light.primaryColor": "#005A8C",
    "theme.light.linkColor": "#005A8C",
    "theme.dark.primaryColor": "#56B4E9",
    "theme.dark.linkColor": "#7CC4EE",
    "theme.chartCategoricalColors": list(PALETTE[:6]),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How this server was started.

    Attributes:
        folder: whose records the overview lists; None for none. Its path is never shown.
        archs: architectures that uploaded weights may have, beside ours and torchvision's.
        upload_mib: largest upload.
    """

    folder: str | None = None
    archs: tuple[str, ...] = ()
    upload_mib: int = 200

    def publish(self) -> None:
        """Make this the settings of the process; pages run in threads that Streamlit starts, and are given nothing."""
        os.environ[_VARIABLE] = json.dumps(dataclasses.asdict(self))


def current() -> Settings:
    """The settings of the process."""
    stated = os.environ.get(_VARIABLE)
    if stated is None:
        return Settings()
    values = json.loads(stated)
    return Settings(values["folder"], tuple(values["archs"]), values["upload_mib"])
