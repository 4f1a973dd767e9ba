"""OpenAI's protocol over the same service."""
