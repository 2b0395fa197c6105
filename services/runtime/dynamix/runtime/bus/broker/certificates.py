"""What to say of a broker's certificate that is not trusted: what is wrong with it, and how to fix it."""

import ssl

NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAME, OTHER_EMAIL, OTHER_ADDRESS = 62, 63, 64
"""OpenSSL's numbers: X509_V_ERR_... of x509_vfy.h."""


def untrusted(error: ssl.SSLCertVerificationError) -> str:
    """The reason in OpenSSL's words, and the fix."""
    return f"the broker's certificate is not trusted ({error.verify_message.rstrip('.')}): {_fix(error.verify_code)}"


def _fix(code: int) -> str:
    if code in (NOT_YET_VALID, EXPIRED):
        return "look at the clocks of both machines, or give the broker a new certificate and restart it"
    if code in (OTHER_NAME, OTHER_EMAIL, OTHER_ADDRESS):
        return "name the broker in DYNAMIX_NATS_URL as its certificate does"
    return "name the certificate of the authority that signed it in DYNAMIX_NATS_CA_FILE"
