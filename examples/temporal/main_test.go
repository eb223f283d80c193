package main

func Example() {
	main()
	// Output:
	// book the flight, command trip-of-full/flight/do
	// the hotel does not answer
	// book the room
	// charge the card
	// flight LH 1, room 12: <nil>
	//
	// book the flight, command trip-of-empty/flight/do
	// the hotel does not answer
	// book the room
	// cancel the room 12
	// cancel the flight LH 1
	// flight LH 1, room 12: saga: trip "trip-of-empty": compensated: step charge: card declined
}
