"""Python imports this module at its start if its directory is in PYTHONPATH: see `field_access`."""

import field_access

field_access.install_when_imported()
