"""Per-token losses of policy and critic, registered in `quintet.config.native.losses`."""
