package adapter

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
)

func TestConnectionHoldsItsSlotUntilItIsClosed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	slots := bulkhead.New(bulkhead.Config{Name: "connections", Limit: 1})
	spaced := NewSpacing("connections", SpacingConfig{})
	d := &Dialer{Policies: resilience.Chain(slots.Wrap, spaced.Wrap)}
	dial := func() (net.Conn, error) { return d.DialContext(context.Background(), "tcp", l.Addr().String()) }

	first, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dial(); !errors.Is(err, bulkhead.ErrFull) {
		t.Fatal("a second connection:", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := dial()
	if err != nil {
		t.Fatal("the slot was not released:", err)
	}
	defer second.Close()
}

func TestSpacingAppearsInARegistry(t *testing.T) {
	policies := registry.New()
	spaced := NewSpacing("logins", SpacingConfig{Least: time.Hour})
	policies.MustAdd(spaced)
	var events []policy.Event
	defer policies.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })()
	nothing := func(context.Context) error { return nil }
	if err := spaced.Do(t.Context(), nothing); err != nil {
		t.Fatal(err)
	}
	if err := spaced.Do(t.Context(), nothing); !resilience.Refused(err) {
		t.Fatal(err)
	}

	e, ok := policies.Get("spacing", "logins")
	if !ok || e.Metrics()[1] != (policy.Metric{Name: "spacing.calls{outcome=refused}", Counter: true, Value: 1}) {
		t.Fatal("its refusal is not counted")
	}
	if len(events) != 1 || events[0].What != "refused" || events[0].Attr("retry_after").Duration() <= 0 {
		t.Fatal(events)
	}
	if h := e.Health(t.Context()); h.Status != policy.Fail || h.State != "closed" {
		t.Fatal(h)
	}
	if _, err := policies.Apply([]byte(`{"spacing/logins": {"Least": "-1s"}}`)); err == nil {
		t.Fatal("an invalid setting was applied")
	}
	report, err := policies.Apply([]byte(`{"spacing/logins": {"Least": "0s"}}`))
	if err != nil || report.String() != `spacing/logins.Least: "1h0m0s" -> "0s"` {
		t.Fatal(report, err)
	}
	if err := spaced.Do(t.Context(), nothing); err != nil {
		t.Fatal(err)
	}
}
