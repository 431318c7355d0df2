"""The host of foreign code: one fork server per pool, one framing, one keeper per worker. Rewards, tools,
environments, agents and verifiers run in its workers; the sandbox uses its framing and its keeper's end."""
