package throttle

import (
	"context"
	"time"
)

// MayWait returns why a call must not wait for as long as after.
func MayWait(ctx context.Context, maxWait, after time.Duration) Reason {
	return mayWait(ctx, maxWait, after)
}
