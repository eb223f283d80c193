// Observed is a program that exports the metrics of its policies, and the traces of its calls, with OpenTelemetry.
// Prometheus can scrape the metrics. Spans and metrics can also be sent to a collector by the protocol OTLP. The log
// has trace IDs.
//
//	go run ./examples/observed                                     # prints some metrics at the end
//	go run ./examples/observed -for 1h                             # scrape http://127.0.0.1:9464/metrics
//	go run ./examples/observed -otlp http://127.0.0.1:4318 -for 1h # also to a collector
package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
)

var addr = flag.String("addr", "127.0.0.1:9464", "the address of /metrics")
var otlp = flag.String("otlp", "", "the URL of a collector for spans and metrics; empty means none")
var lasts = flag.Duration("for", 2*time.Second, "the duration of the load")

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer) (err error) {
	meters, tracers, err := providers(ctx)
	if err != nil {
		return err
	}
	logger := slog.New(withTrace{slog.NewTextHandler(out, nil)})

	// Create the policies, observe them, and create a client that uses them.
	retries := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(10 * time.Millisecond)})
	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 3, OpenFor: 50 * time.Millisecond})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 2, MaxWait: time.Second})
	reg := registry.New()
	reg.MustAdd(retries, circuit, slots)
	cfg := resilienceotel.Config{MeterProvider: meters, TracerProvider: tracers}
	stop, err := resilienceotel.Observe(reg, cfg)
	if err != nil {
		return err
	}
	defer stop()
	defer func() { // before stop, because Shutdown collects the metrics of the policies once more
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, tracers.Shutdown(end), meters.Shutdown(end)) // sends the remaining spans and metrics
	}()
	defer reg.Observe(registry.Log(logger))()
	t := resilienceotel.New(cfg)
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Chain(t.Call("users"), retries.Wrap, circuit.Wrap, slots.Wrap, t.Attempt("users")),
	}}

	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		return err
	}
	metrics := &http.Server{Handler: promhttp.Handler()}
	go func() { _ = metrics.Serve(listener) }()
	defer func() { _ = metrics.Close() }()
	load(ctx, client, logger)
	return show(out, "http://"+listener.Addr().String()+"/metrics")
}

// providers sets up the OpenTelemetry SDK, as in every program that uses OpenTelemetry.
func providers(ctx context.Context) (*metric.MeterProvider, *sdktrace.TracerProvider, error) {
	scraped, err := prometheus.New(prometheus.WithoutScopeInfo())
	if err != nil || *otlp == "" {
		return metric.NewMeterProvider(metric.WithReader(scraped)), sdktrace.NewTracerProvider(), err
	}
	spans, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(*otlp+"/v1/traces"))
	sent, err2 := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(*otlp+"/v1/metrics"))
	return metric.NewMeterProvider(metric.WithReader(scraped), metric.WithReader(metric.NewPeriodicReader(sent))),
		sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans)), errors.Join(err, err2)
}

// withTrace is a slog.Handler that adds the trace ID and the span ID of the span in ctx to each log record.
type withTrace struct{ slog.Handler }

func (h withTrace) Handle(ctx context.Context, r slog.Record) error {
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		r.AddAttrs(slog.String("trace_id", span.TraceID().String()), slog.String("span_id", span.SpanID().String()))
	}
	return h.Handler.Handle(ctx, r)
}

// load sends requests to a backend, which fails for a while.
func load(ctx context.Context, client *http.Client, logger *slog.Logger) {
	script := faults.New(faults.Config{Enabled: true, Plans: []faults.Plan{
		{Kind: faults.Latency, Delay: 2 * time.Millisecond},
		{Kind: faults.Fail, At: *lasts / 4, Count: 8},
	}})
	answer := func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ada") }
	backend := httptest.NewServer(faults.Handler(script, http.HandlerFunc(answer)))
	defer backend.Close()
	for end := time.Now().Add(*lasts); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
		if resp, err := client.Get(backend.URL); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		} else if !resilience.Refused(err) {
			logger.ErrorContext(ctx, "request failed", "err", err)
		}
	}
}

// show prints the metrics of the breaker and of the calls.
func show(out io.Writer, url string) error {
	resp, err := http.Get(url)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "resilience_breaker_call") ||
			strings.HasPrefix(line, "resilience_call_duration_seconds_count") {
			_, err = fmt.Fprintln(out, line)
		}
	}
	return cmp.Or(err, lines.Err())
}
