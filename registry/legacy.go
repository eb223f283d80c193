package registry

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"reflect"
	"strings"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/policy"
)

// A describer is a policy: a [policy.Describer] once every policy is one.
type describer = any

// descriptionOf returns the description of p, or false if p is no policy.
func descriptionOf(p describer) (describer, policy.Description, bool) {
	if l, ok := p.(legacy); ok {
		p = l.p
	}
	d, ok := describe.Of(p)
	if _, converted := p.(policy.Describer); converted || !ok {
		return p, d, ok
	}
	if health := d.Health; health != nil {
		d.Health = func(ctx context.Context) policy.Health {
			h := health(ctx)
			h.State = snake(h.State)
			return h
		}
	}
	if observe := d.Observe; observe != nil {
		d.Observe = func(f func(context.Context, policy.Event)) func() {
			return observe(func(ctx context.Context, e policy.Event) {
				e.What = snake(e.What)
				for i, a := range e.Attrs {
					switch a.Key {
					case "reason", "outcome", "from", "to", "state", "status":
						e.Attrs[i].Value = slog.StringValue(snake(a.Value.String()))
					}
				}
				f(ctx, e)
			})
		}
	}
	all := reflect.ValueOf(p).MethodByName("All")
	if d.Members == nil && all.IsValid() && all.Type().NumIn() == 0 && all.Type().NumOut() == 1 && all.Type().Out(0).CanSeq2() {
		d.Members = func() iter.Seq2[string, policy.Describer] {
			return func(yield func(string, policy.Describer) bool) {
				for key, value := range all.Call(nil)[0].Seq2() {
					if !yield(fmt.Sprint(key.Interface()), legacy{value.Interface()}) {
						return
					}
				}
			}
		}
	}
	return p, d, ok
}

// legacy is a policy that is not a [policy.Describer] yet.
type legacy struct{ p any }

func (legacy) Describe() policy.Description { return policy.Description{} }

func snake(text string) string { return strings.NewReplacer(" ", "_", "-", "_").Replace(text) }
