"""A module that a fork server must not preload: it starts a thread."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
