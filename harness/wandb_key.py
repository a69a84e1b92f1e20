"""Whether W&B has a key on this machine. Its own answer, `wandb.api.api_key`, is deprecated and says so on stderr."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit


def has_key() -> bool:
    """Return whether W&B would find credentials: in its settings, the environment or netrc. Asks no server."""
    import wandb

    settings = wandb.setup().settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or settings.identity_token_file:
        return True
    netrc = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = urlsplit(settings.base_url).hostname
    return host is not None and netrc.is_file() and host in netrc.read_text(errors="replace")
