"""Where the division used to be; see `dynamix.schemas.apportion`."""

from dynamix.schemas.apportion import apportion

__all__ = ["apportion"]
