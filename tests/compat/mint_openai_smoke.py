"""MinT's OpenAI smoke by its shape: models, completions, chat completions at `<base>/oai/api/v1`, with `openai`.

`python mint_openai_smoke.py` with MINT_BASE_URL and MINT_API_KEY set; prints one JSON line.
"""

from __future__ import annotations

import json
import os

from dotenv import load_dotenv
from openai import OpenAI

import mint

load_dotenv(".env")


def main() -> None:
    service_client = mint.ServiceClient()
    training_client = service_client.create_lora_training_client(base_model="mint/tiny", rank=8, seed=1)
    path = training_client.save_weights_for_sampler(name="smoke").result().path
    client = OpenAI(
        base_url=f"{os.environ['MINT_BASE_URL'].rstrip('/')}/oai/api/v1", api_key=os.environ["MINT_API_KEY"]
    )
    names = [row.id for row in client.models.list()]
    texts = {
        model: client.completions.create(model=model, prompt="Question: 1 + 1 =", max_tokens=6, seed=1).choices[0].text
        for model in ("mint/tiny", path)
    }
    chat = client.chat.completions.create(
        model="mint/tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=6
    )
    print(json.dumps({"models": names, "texts": texts, "role": chat.choices[0].message.role, "path": path}))


if __name__ == "__main__":
    main()
