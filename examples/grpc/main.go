// Grpc is a program with a gRPC server and a gRPC client. The server limits its clients. The client retries idempotent
// calls, and stops calling the server if it is down. Both run in one process, so the program needs no other service.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/examples/grpc/userspb"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func main() { run(context.Background(), os.Stdout) }

func run(ctx context.Context, out io.Writer) {
	script := faults.New(faults.Config{Enabled: true})
	fail := func(calls int) { // makes the next calls to the server fail
		down := faults.Plan{Kind: faults.Fail, Err: status.Error(codes.Unavailable, "try later"), Count: calls}
		check(script.Update(func(c *faults.Config) { c.Plans = []faults.Plan{down} }))
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	server := newServer(script)
	go func() { _ = server.Serve(lis) }()
	defer server.Stop()

	// Create policies once; all calls to the service share them.
	retries := retry.New(retry.Config{
		Attempts: 3,
		Backoff:  retry.Exponential(10*time.Millisecond, time.Second),
	})
	retries.Observe(func(ctx context.Context, e retry.Event) {
		if e.Kind == retry.EventRetried {
			fmt.Fprintf(out, "  attempt %d of %s: %v\n", e.Attempts, resiliencegrpc.MethodOf(ctx), status.Code(e.Err))
		}
	})
	down := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 5, OpenFor: 100 * time.Millisecond})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 8})
	streams := bulkhead.New(bulkhead.Config{Name: "user streams", Limit: 8})
	conn, err := grpc.NewClient(lis.Addr().String(), append(resiliencegrpc.Client{
		Middleware:  resilience.Chain(retries.Wrap, down.Wrap, slots.Wrap, resilience.Timeout(time.Second)),
		StreamSlots: streams,
		Idle:        time.Minute,
	}.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	check(err)
	defer conn.Close()
	client := userspb.NewUsersClient(conn)

	fmt.Fprintln(out, "A Get that fails twice is retried, because users.proto declares it idempotent:")
	fail(2)
	user, err := client.Get(ctx, &userspb.GetRequest{Id: 1})
	check(err)
	fmt.Fprintf(out, "  user %d is %s\n", user.GetId(), user.GetName())

	fmt.Fprintln(out, "A Create is not retried:")
	fail(1)
	_, err = client.Create(ctx, &userspb.CreateRequest{Name: "Grace"})
	fmt.Fprintf(out, "  %v\n", err)

	fmt.Fprintln(out, "An open stream is not retried, and holds a slot for streams. Its status is its result:")
	fail(1)
	for range 2 {
		stream, err := client.List(ctx, &userspb.ListRequest{})
		check(err)
		for user, err = stream.Recv(); err == nil; user, err = stream.Recv() {
			fmt.Fprintf(out, "  user %d is %s, calls: %d, streams: %d\n",
				user.GetId(), user.GetName(), slots.Stats().InFlight, streams.Stats().InFlight)
		}
		fmt.Fprintf(out, "  %v, consecutive failures: %d\n", err, down.Stats().Window.ConsecutiveFailures)
	}

	fmt.Fprintln(out, "A client that is too fast waits for the time that the server returns:")
	start := time.Now()
	for range 20 {
		_, err := client.Get(ctx, &userspb.GetRequest{Id: 1})
		check(err)
	}
	fmt.Fprintf(out, "  20 calls, waited: %v\n", time.Since(start) > 50*time.Millisecond)

	fmt.Fprintln(out, "A server that is down is not called:")
	fail(1000)
	time.Sleep(100 * time.Millisecond) // time for the server's rate limit to refill
	for range 6 {
		_, err = client.Create(ctx, &userspb.CreateRequest{Name: "Grace"})
	}
	fmt.Fprintf(out, "  breaker open: %v\n  %v: %v\n", errors.Is(err, breaker.ErrOpen), status.Code(err), err)
}

// newServer returns a server that limits each client by its IP address. Calls to the server fail as the script
// specifies.
func newServer(script *faults.Script) *grpc.Server {
	server := grpc.NewServer(resiliencegrpc.Server{
		Limit:      throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 100, Burst: 10}}),
		Key:        resiliencegrpc.ClientIP(), // pass the addresses of your proxies, if there are any
		Slots:      bulkhead.New(bulkhead.Config{Name: "server", Limit: 64}),
		Middleware: func(next resilience.Func) resilience.Func { return faults.Func(script, next) },
	}.Options()...)
	userspb.RegisterUsersServer(server, users{})
	return server
}

type users struct {
	userspb.UnimplementedUsersServer
}

var names = []string{"Ada", "Grace"}

func (users) Get(_ context.Context, r *userspb.GetRequest) (*userspb.User, error) {
	return &userspb.User{Id: r.GetId(), Name: names[r.GetId()-1]}, nil
}

func (users) Create(_ context.Context, r *userspb.CreateRequest) (*userspb.User, error) {
	return &userspb.User{Id: 3, Name: r.GetName()}, nil
}

func (users) List(_ *userspb.ListRequest, stream grpc.ServerStreamingServer[userspb.User]) error {
	for i, name := range names {
		if err := stream.Send(&userspb.User{Id: int64(i + 1), Name: name}); err != nil {
			return err
		}
	}
	return nil
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
