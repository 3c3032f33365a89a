function dayName(day) {
  if (day === 1) {
    return "Monday";
  }
  if (day === 2) {
    return "Tuesday";
  }
  if (day === 3) {
    return "Wednesday";
  }
  if (day === 4) {
    return "Thursday";
  }
  if (day === 5) {
    return "Friday";
  }
  return "unknown";
}
