"""Which flags hold secrets, and words without them."""

SECRET_ENDINGS = ("_token", "api_key", "_secret", "password")  # flags with these endings are written to no file


def is_secret(name: str) -> bool:
    """Whether a flag of this name holds a secret: hub_token, api_key."""
    return name.lower() == "token" or name.lower().endswith(SECRET_ENDINGS)


def without_secrets(words: list[str]) -> list[str]:
    """["--hub_token", "hf_x", "--a-token=y"] -> ["--hub_token", "***", "--a-token=***"]."""
    shown, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and is_secret(name.replace("-", "_"))
        if hide:
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        shown.append(word)
        hide = secret and not equals
    return shown
