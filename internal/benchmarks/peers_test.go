package benchmarks

import (
	_ "github.com/Yiling-J/theine-go"
	_ "github.com/avast/retry-go/v4"
	_ "github.com/cenkalti/backoff/v4"
	_ "github.com/eapache/go-resiliency/breaker"
	_ "github.com/failsafe-go/failsafe-go"
	_ "github.com/failsafe-go/failsafe-go/failsafehttp"
	_ "github.com/go-redis/cache/v9"
	_ "github.com/go-redis/redis_rate/v10"
	_ "github.com/hashicorp/go-retryablehttp"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/maypok86/otter/v2"
	_ "github.com/redis/go-redis/v9"
	_ "github.com/sethvargo/go-limiter/memorystore"
	_ "github.com/sethvargo/go-retry"
	_ "github.com/sony/gobreaker/v2"
	_ "github.com/throttled/throttled/v2"
	_ "github.com/throttled/throttled/v2/store/memstore"
	_ "github.com/viccon/sturdyc"
	_ "go.uber.org/ratelimit"
	_ "golang.org/x/sync/semaphore"
	_ "golang.org/x/time/rate"
	_ "modernc.org/sqlite"

	_ "github.com/go-resilience/resilience"
	_ "github.com/stretchr/testify/require"
)
