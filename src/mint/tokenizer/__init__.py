"""A model's tokenizer, with the methods of a Hugging Face tokenizer, and the bytes of each token for stop strings."""

from mint.tokenizer.loading import TOKENIZER_FILES, load_tokenizer, tokenizer_files
from mint.tokenizer.token_bytes import special_token_ids, token_bytes, token_pieces

__all__ = [
    "TOKENIZER_FILES",
    "load_tokenizer",
    "special_token_ids",
    "token_bytes",
    "token_pieces",
    "tokenizer_files",
]
