#!/usr/bin/env bash
# Serves mint on the head of a Ray cluster that `ray up deploy/ray-cluster.yaml` has started; see there.
set -euo pipefail
export RAY_AUTH_MODE=token
exec ~/mint-env/bin/mint serve --cluster auto --trainers "${MINT_TRAINERS:-4}" --samplers "${MINT_SAMPLERS:-0}" \
    --data-dir ~/mint-data "$@"
