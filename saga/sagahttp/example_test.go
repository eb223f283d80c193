package sagahttp_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
)

// A step sends its command. All attempts have the same Idempotency-Key.
func ExampleSend() {
	hotel := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		fmt.Println(r.Method, r.Header.Get("Idempotency-Key"))
	}))
	defer hotel.Close()
	book := func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, hotel.URL, nil)
		if err != nil {
			return err
		}
		return sagahttp.Send(hotel.Client(), req, nil)
	}
	// In a Do, ctx has the command of the step.
	ctx := saga.WithCommand(context.Background(), saga.Command{ID: "trip-17/hotel/do"})
	fmt.Println(book(ctx))
	// Output:
	// POST trip-17/hotel/do
	// <nil>
}

// A status becomes the error of a Do.
func ExampleResult() {
	for _, declined := range []bool{false, true} {
		resp := &http.Response{StatusCode: http.StatusUnprocessableEntity, Header: http.Header{}}
		if declined {
			resp.Header.Set("Saga-Command", "declined")
		}
		err := sagahttp.Result(resp, nil)
		fmt.Println(err != nil, saga.IsDeclined(err))
	}
	// Output:
	// true false
	// true true
}

// A request without the id of a command is answered with 400.
func ExampleHandler() {
	handler := &sagahttp.Handler{} // with the participant's DB, and an Apply that makes the changes
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/bookings", nil))
	fmt.Print(w.Code, " ", w.Body)
	// Output: 400 the field Idempotency-Key must be the id of a command
}
