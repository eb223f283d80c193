// Grpc is a gRPC server that limits its clients, and a client that retries what may be
// repeated and leaves a server alone that is down. Both are in one process, so that the
// program needs nothing else.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/examples/grpc/userspb"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer) error {
	users := &users{}
	addr, stop, err := listen(users)
	if err != nil {
		return err
	}
	defer stop()

	// Built once, shared by all calls of the service.
	retries := retry.New(retry.Config{
		Attempts: 3,
		Backoff:  retry.Exponential(10*time.Millisecond, time.Second),
		OnRetry: func(ctx context.Context, a retry.Attempt) {
			fmt.Fprintf(out, "  attempt %d of %s: %v\n", a.Number, resiliencegrpc.MethodOf(ctx), status.Code(a.Err))
		},
	})
	circuit := breaker.New(breaker.Config{Name: "users", Failures: 5, OpenFor: 100 * time.Millisecond})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 8})
	conn, err := grpc.NewClient(addr, append(resiliencegrpc.Client{
		Middleware: resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(time.Second)),
	}.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	client := userspb.NewUsersClient(conn)

	fmt.Fprintln(out, "A Get that fails twice is repeated, because users.proto says that it may be:")
	users.fail.Store(2)
	user, err := client.Get(ctx, &userspb.GetRequest{Id: 1})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "  user %d is %s\n", user.GetId(), user.GetName())

	fmt.Fprintln(out, "A Create is not:")
	users.fail.Store(1)
	_, err = client.Create(ctx, &userspb.CreateRequest{Name: "Grace"})
	fmt.Fprintf(out, "  %v\n", err)

	fmt.Fprintln(out, "A stream is, until its first message has arrived, and holds its slot until it ends:")
	users.fail.Store(1)
	if err := list(ctx, out, client, slots); err != nil {
		return err
	}

	fmt.Fprintln(out, "A client that is too fast waits for as long as the server says:")
	begun := time.Now()
	for range 20 {
		if _, err := client.Get(ctx, &userspb.GetRequest{Id: 1}); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "  20 calls, waited: %v\n", time.Since(begun) > 50*time.Millisecond)

	fmt.Fprintln(out, "A server that is down is left alone:")
	users.fail.Store(1000)
	time.Sleep(100 * time.Millisecond) // the limit of the server refills
	for range 6 {
		_, err = client.Create(ctx, &userspb.CreateRequest{Name: "Grace"})
	}
	if !errors.Is(err, breaker.ErrOpen) {
		return fmt.Errorf("the circuit is not open: %w", err)
	}
	fmt.Fprintf(out, "  %v: %v\n", status.Code(err), err)
	return nil
}

// list prints all users.
func list(ctx context.Context, out io.Writer, client userspb.UsersClient, slots *bulkhead.Bulkhead) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream, and frees its slot, if it is not drained
	stream, err := client.List(ctx, &userspb.ListRequest{})
	if err != nil {
		return err
	}
	for {
		user, err := stream.Recv()
		if err == io.EOF {
			fmt.Fprintf(out, "  in flight at the end: %d\n", slots.Stats().InFlight)
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  user %d is %s, in flight: %d\n", user.GetId(), user.GetName(), slots.Stats().InFlight)
	}
}

// listen starts a server that limits each client, by its address.
func listen(users *users) (addr string, stop func(), err error) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := grpc.NewServer(resiliencegrpc.Server{
		Limit: throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 100, Burst: 10}}),
		Key:   resiliencegrpc.PeerIP(),
		Slots: bulkhead.New(bulkhead.Config{Name: "server", Limit: 64}),
	}.Options()...)
	userspb.RegisterUsersServer(server, users)
	go func() { _ = server.Serve(lis) }()
	return lis.Addr().String(), server.Stop, nil
}

// users is a service that fails as often as it is told to.
type users struct {
	userspb.UnimplementedUsersServer
	fail atomic.Int64
}

var names = []string{"Ada", "Grace"}

func (u *users) down() error {
	if u.fail.Add(-1) >= 0 {
		return status.Error(codes.Unavailable, "try later")
	}
	return nil
}

func (u *users) Get(_ context.Context, r *userspb.GetRequest) (*userspb.User, error) {
	if err := u.down(); err != nil {
		return nil, err
	}
	return &userspb.User{Id: r.GetId(), Name: names[r.GetId()-1]}, nil
}

func (u *users) Create(_ context.Context, r *userspb.CreateRequest) (*userspb.User, error) {
	if err := u.down(); err != nil {
		return nil, err
	}
	return &userspb.User{Id: 3, Name: r.GetName()}, nil
}

func (u *users) List(_ *userspb.ListRequest, stream grpc.ServerStreamingServer[userspb.User]) error {
	if err := u.down(); err != nil {
		return err
	}
	for i, name := range names {
		if err := stream.Send(&userspb.User{Id: int64(i + 1), Name: name}); err != nil {
			return err
		}
	}
	return nil
}
