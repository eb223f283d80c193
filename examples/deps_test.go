package examples

import (
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite"

	_ "github.com/go-resilience/resilience"
	_ "github.com/stretchr/testify/require"
)
