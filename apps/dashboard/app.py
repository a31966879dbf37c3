"""The script that Streamlit runs for every browser: navigation, and one page.

Nothing here imports torch; pages that need it import it when they are shown.
"""

from __future__ import annotations

import threading
import time

import streamlit as st

from deepseal.apps.dashboard.workspace import sweep, workspace


@st.cache_resource(show_spinner=False)
def _begin() -> None:
    """Once a server: old folders go, and what pages will need is loaded while the first page is read."""
    sweep()
    threading.Thread(target=_warm, daemon=True).start()


def _warm() -> None:
    time.sleep(4.0)
    import deepseal.attacks
    import deepseal.watermark  # noqa: F401


def _overview() -> None:
    from deepseal.apps.dashboard.overview import show

    show(workspace())


def _mark() -> None:
    from deepseal.apps.dashboard.mark import show

    show(workspace())


def _attack() -> None:
    from deepseal.apps.dashboard.attack import show

    show(workspace())


def _defend() -> None:
    from deepseal.apps.dashboard.defend import show

    show(workspace())


def _private() -> None:
    from deepseal.apps.dashboard.private import show

    show(workspace())


# Streamlit writes in white on the light blue that the dark theme has for buttons.
_STYLE = "<style>[data-testid^=stBaseButton-primary] { color: light-dark(#ffffff, #101214); }</style>"

st.set_page_config(page_title="DeepSeal", page_icon="🛡️", layout="wide")
_begin()
st.html(_STYLE)
st.navigation(
    [
        st.Page(_overview, title="Overview", icon=":material/list_alt:", url_path="overview", default=True),
        st.Page(_mark, title="Mark and verify", icon=":material/fingerprint:", url_path="mark"),
        st.Page(_attack, title="Attack", icon=":material/swords:", url_path="attack"),
        st.Page(_defend, title="Defend", icon=":material/shield:", url_path="defend"),
        st.Page(_private, title="Private inference", icon=":material/lock:", url_path="private"),
    ]
).run()
